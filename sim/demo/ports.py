"""Ports for servers that are started with a fixed address."""

from __future__ import annotations

import itertools
import secrets
import socket
from contextlib import suppress

FIRST, LAST = 10_000, 32_000  # limit: ports outside the ephemeral range of Linux
"""Linux gives its clients ports from 32,768 on. A client may take such a port while its server restarts."""

# Each process begins at another port: two processes rarely choose the same one at the same time.
_ports = itertools.islice(itertools.cycle(range(FIRST, LAST)), secrets.randbelow(LAST - FIRST), None)


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """Returns a port of 127.0.0.1 to which no socket is bound. A process gets each port once, until all were given.

    Args:
        kind: `SOCK_STREAM` for a TCP port, `SOCK_DGRAM` for a UDP port.

    Raises:
        OSError: every port from `FIRST` to `LAST` is in use.
    """
    for port in itertools.islice(_ports, LAST - FIRST):
        with socket.socket(socket.AF_INET, kind) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"every port from {FIRST} to {LAST - 1} of 127.0.0.1 is in use")


def free_address() -> str:
    """Returns `127.0.0.1:PORT` with a free TCP port."""
    return f"127.0.0.1:{free_port()}"
