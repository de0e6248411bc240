"""The interpreter that Spark starts: ``fork_client.py SOCKET PYTHON [argument…]``. It asks the fork server to fork the
process.

The forked process gets the standard files and the environment of this process. This process waits, and ends with the
same exit code. Without a server, this process becomes the interpreter PYTHON. It is run as a file, without `site`, and
imports nothing of the center, because all of Spark's processes wait for it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys


def main(path: str, interpreter: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        if arguments[:1] == ["-m"] and _is_started(server, path, arguments):
            code = server.recv(4)
            sys.exit(struct.unpack("!i", code)[0] & 0xFF if code else "the server of Python processes has ended")
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
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
