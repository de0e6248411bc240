"""The interpreter that Spark starts: ``fork_client.py SOCKET PYTHON [argument…]``; it has the server fork the process.

Its standard files and environment are the process's own, and it ends as the process does. If there is no server, this
process becomes the interpreter PYTHON. It runs as a file, without `site`, and imports nothing of the center: all that it
loads is added to the start of each of Spark's processes.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys


def main(path: str, interpreter: str, arguments: list[str]) -> int:
    """Returns the exit code of the process, or does not return."""
    with socket.socket(socket.AF_UNIX) as server:
        if arguments[:1] == ["-m"] and _is_started(server, path, arguments):
            code = server.recv(4)
            return struct.unpack("!i", code)[0] & 0xFF if len(code) == 4 else 1
    os.execv(interpreter, [interpreter, *arguments])


def _is_started(server: socket.socket, path: str, arguments: list[str]) -> bool:
    request = json.dumps([arguments, dict(os.environ)]).encode()
    try:
        server.connect(path)
        socket.send_fds(server, [struct.pack("!I", len(request))], [0, 1, 2])
        server.sendall(request)
        return server.recv(1) != b""
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
