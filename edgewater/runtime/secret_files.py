"""Files with secrets. Any path may be configured, so a file is opened without a wait, and read up to a limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 64 << 10  # limit: memory of a secret


def read_secret_file(path: Path, *, is_pem: bool = False) -> str:
    """Returns the secret in a file, without white space around it.

    Args:
        is_pem: whether the secret may have several lines.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, or its content is no secret. The message does not quote the content.
    """
    # A FIFO would wait for a writer, and a device such as /dev/zero has no end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)  # `open` leaves a directory open that it refuses
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    try:
        return require_line(content.decode(), is_pem=is_pem)
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None


def require_line(text: str, *, is_pem: bool = False) -> str:
    """Returns a secret without white space around it. Raises ValueError, without quoting it, if it is not one line of
    printable characters.

    A line break in a token would end a header of HTTP.
    """
    text = text.strip()
    if not text or not (text.isprintable() or (is_pem and all(map(str.isprintable, text.splitlines())))):
        raise ValueError("it is not one line of printable characters")
    return text
