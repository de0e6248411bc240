"""Listening sockets that stay open while `execv` replaces the program of a process.

So the process refuses no connection. Connections wait in the backlog of the socket until the new program accepts them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping, Sequence

from edgewater.runtime.health import listen

VARIABLE = "EDGEWATER_LISTENERS"


class Listeners:
    """The listening sockets of a process, by their configured address.

    Args:
        environ: may have the variable `VARIABLE`, with the sockets of the program that ran in this process before.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._environ = environ
        inherited = json.loads(environ.pop(VARIABLE, "{}"))
        self._kept = {name: socket.socket(fileno=fd) for name, fd in inherited.items()}

    def listen(self, addresses: Sequence[tuple[str, str]]) -> list[socket.socket]:
        """Returns a listening socket for each address. Sockets of other addresses are closed.

        The caller may close the returned sockets, because this object keeps a duplicate of each for the next program.

        Args:
            addresses: each address, and the configuration key that has it.

        Raises:
            InvalidConfig: an address is not available. The error names the key, and no socket is closed.
        """
        names: list[str] = []
        for address, field in addresses:
            # Port 0: each key gets a different free port.
            name = f"{field} {address}" if address.endswith(":0") else address
            if name not in self._kept or name in names:  # the second of two equal addresses is not available
                self._kept[name] = listen(address, field)
            names.append(name)
        for name in self._kept.keys() - set(names):
            self._kept.pop(name).close()
        return [self._kept[name].dup() for name in names]

    def close(self) -> None:
        """Closes all sockets."""
        while self._kept:
            self._kept.popitem()[1].close()

    def hand_over(self) -> None:
        """Passes the sockets to the program that `execv` starts in this process."""
        for each in self._kept.values():
            each.set_inheritable(True)
        self._environ[VARIABLE] = json.dumps({name: each.fileno() for name, each in self._kept.items()})
