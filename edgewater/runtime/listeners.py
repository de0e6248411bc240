"""Listening sockets that outlive `execv`, so that a process that begins again refuses no connection.

Connections that come in the meantime wait in the backlog of the socket, which the kernel keeps.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping

from edgewater.runtime.health import listen

VARIABLE = "EDGEWATER_LISTENERS"


class Listeners:
    """The listening sockets of a process, by their configured address.

    Args:
        environ: may state sockets of the program that ran in this process before. They are taken over.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._environ = environ
        inherited = json.loads(environ.pop(VARIABLE, "{}"))
        self._inherited = {address: socket.socket(fileno=fd) for address, fd in inherited.items()}
        self._open: dict[str, socket.socket] = {}

    def listen(self, address: str, field: str) -> socket.socket:
        """Returns a listening socket, whose connections the next program gets once it is closed.

        Raises:
            InvalidConfig: the address is not available; names the key `field`.
        """
        kept = self._inherited.pop(address, None) or self._open.pop(address, None) or listen(address, field)
        self._open[address] = kept
        return kept.dup()

    def close_unused(self) -> None:
        """Closes inherited sockets for which nobody has asked: their addresses are no longer configured."""
        while self._inherited:
            self._inherited.popitem()[1].close()

    def close(self) -> None:
        """Closes all sockets."""
        self.close_unused()
        while self._open:
            self._open.popitem()[1].close()

    def hand_over(self) -> None:
        """Leaves the sockets to the program that `execv` starts in this process."""
        kept = {**self._inherited, **self._open}
        for each in kept.values():
            each.set_inheritable(True)
        self._environ[VARIABLE] = json.dumps({address: each.fileno() for address, each in kept.items()})
