"""Splits the bytes of a TCP connection into syslog messages, with both framings of RFC 6587.

With octet counting, each message follows its length and a space. Otherwise a line feed or a NUL ends each message, and
so does a carriage return before the priority of the next message. The first byte of a connection tells which framing it
has: a digit, or the ``<`` with which each message begins.
"""

from __future__ import annotations

import re

import numpy as np

from edge.codecs.messages import joined

MAX_DIGITS = 10  # limit: length of a message
_NO_LENGTH = "no length of a message; expected a decimal number and a space, or a message such as <13>…"
_RETURN = re.compile(rb"\r(?=<\d{1,3}>)")
_TRAILERS = re.compile(rb"[\r\n\0]*")
MAX_EXAMPLE = 200
"""The bytes of a rejected message that its example shows."""


class BadFrame(Exception):
    """The bytes have no valid length, or no end, so nothing that follows can be split.

    Attributes:
        before: the complete messages before the fault, each with a line feed at its end.
    """

    def __init__(self, example: bytes, before: bytes, message: str = _NO_LENGTH) -> None:
        self.example, self.before = example[:MAX_EXAMPLE], before
        super().__init__(message)


class Framing:
    """The state of one connection. It stores at most one incomplete message.

    Args:
        max_bytes: the largest size of a message. Longer messages are skipped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._counts_octets: bool | None = None
        self._rest = b""
        self._skips = 0  # with octet counting: the bytes still to skip of a message that is too long
        self._skips_line = False
        self._too_long: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Returns the messages that end in these bytes, each with a line feed at its end.

        A line feed inside a message becomes a space.

        Raises:
            BadFrame: the rest of the connection cannot be read. Close it.
        """
        data = self._rest + data
        if self._counts_octets is None and data:
            self._counts_octets = data[:1].isdigit()
        if self._counts_octets:
            return self._counted(data)
        data = data.replace(b"\0", b"\n")
        return self._lines(_RETURN.sub(b"\n", data) if b"\r" in data else data)

    def end(self, *, is_cut: bool = False) -> bytes:
        """Returns the rest after a connection has ended: without octet counting, the last message.

        Args:
            is_cut: whether the connection has failed, or was closed by this side.

        Raises:
            BadFrame: the rest is a part of a message.
        """
        rest, self._rest = self._rest, b""
        if self._skips_line or not rest.strip():
            return b""
        if self._counts_octets or is_cut:
            raise BadFrame(rest, b"", "a part of a message; the connection has ended before the message")
        return rest + b"\n"

    def take_too_long(self) -> list[bytes]:
        """Returns the beginnings of the too long messages since the last call, and forgets them."""
        found, self._too_long = self._too_long, []
        return found

    def _lines(self, data: bytes) -> bytes:
        cut = data.rfind(b"\n") + 1
        lines, self._rest = data[:cut], data[cut:]
        if cut and self._skips_line:
            lines, self._skips_line = lines[lines.find(b"\n") + 1 :], False
        if len(self._rest) > self._max_bytes:
            if not self._skips_line:
                self._too_long.append(self._rest[:MAX_EXAMPLE])
            self._skips_line = True
        if self._skips_line:  # a carriage return and a part of the next priority may have arrived
            self._rest = self._rest[-5:] if b"\r" in self._rest[-5:] else b""
        return self._without_long(lines) if len(lines) > self._max_bytes else lines

    def _without_long(self, lines: bytes) -> bytes:
        ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n"))
        if np.diff(ends, prepend=-1).max() <= self._max_bytes + 1:
            return lines
        each = lines.splitlines(keepends=True)
        self._too_long += [line[:MAX_EXAMPLE] for line in each if len(line) > self._max_bytes + 1]
        return b"".join(line for line in each if len(line) <= self._max_bytes + 1)

    def _counted(self, data: bytes) -> bytes:
        at, messages = 0, list[bytes]()
        while True:
            skipped = min(self._skips, len(data) - at)
            at, self._skips = at + skipped, self._skips - skipped
            if not self._skips:
                at = _TRAILERS.match(data, at).end()  # type: ignore[union-attr]
            space = data.find(b" ", at, at + MAX_DIGITS + 1)
            digits = data[at:space] if space >= 0 else data[at : at + MAX_DIGITS + 1]
            if digits and (not digits.isdigit() or len(digits) > MAX_DIGITS):
                self._rest = b""
                raise BadFrame(data[at:], _as_lines(messages))
            if space < 0:
                break
            if not digits:
                self._rest = b""
                raise BadFrame(data[at:], _as_lines(messages))
            length, begin = int(digits), space + 1
            if length > self._max_bytes:
                if len(data) - begin < min(length, MAX_EXAMPLE):
                    break
                self._too_long.append(data[begin : begin + MAX_EXAMPLE])
                at, self._skips = begin, length
            elif begin + length > len(data):
                break
            else:
                messages.append(data[begin : begin + length])
                at = begin + length
        self._rest = data[at:]
        return _as_lines(messages)


def _as_lines(messages: list[bytes]) -> bytes:
    return joined(messages) + b"\n" if messages else b""
