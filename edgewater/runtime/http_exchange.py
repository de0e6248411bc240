"""Exchanges over HTTP with servers that may be hostile: bounded replies, and messages without secrets."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

MOST_REPLY_BYTES = 4 << 10
"""Bytes of the body of a reply that are read. A receiver of data says in a few words why it refuses a request."""

LEAST_SECRET = 4
"""Characters of the shortest secret that messages do not show. Shorter values are words of other texts, too."""
LEAST_TOKEN = 8
"""Characters of the shortest part of a URL that messages do not show: other parts are words such as ``write``."""
_PARTS = re.compile("[/?&=;]")


@dataclass(frozen=True, slots=True)
class Reply:
    """The status of a reply, and the first part of its body as text, without words of the request's headers and URL."""

    status: int
    text: str

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


def post(client: httpx.Client, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Reply:
    """Posts a body, and returns the reply. Redirects are not followed.

    Args:
        timeout_s: of each step. The body of the reply is read for at most this time, and the wait for its last bytes.

    Raises:
        httpx.HTTPError, httpx.InvalidURL, ValueError: the exchange has failed. Name it by `failure`.
    """
    plain = {**headers, "Accept-Encoding": "identity"}  # a compressed reply could fill the memory
    with client.stream("POST", url, content=body, headers=plain, timeout=timeout_s) as reply:
        ends_s, read = time.monotonic() + timeout_s, b""
        for part in reply.iter_raw():
            read += part
            if len(read) >= MOST_REPLY_BYTES or time.monotonic() >= ends_s:
                break
    text = read[:MOST_REPLY_BYTES].decode(errors="replace")
    target = httpx.URL(url)
    parts = _PARTS.split(f"{target.raw_path.decode()}/{target.path}/{target.userinfo.decode()}")
    sent = {word for value in headers.values() for word in value.split() if len(word) >= LEAST_SECRET}
    for word in sorted(sent.union(part for part in parts if len(part) >= LEAST_TOKEN), key=len, reverse=True):
        text = text.replace(word, "…")  # some servers quote what they refuse
    return Reply(reply.status_code, text)


def failure(exc: Exception) -> str:
    """Returns what has failed, without what was sent: the library quotes a header that it refuses, such as a token."""
    is_about_network = isinstance(exc, httpx.NetworkError | httpx.TimeoutException)
    return (str(exc) if is_about_network else "") or type(exc).__name__


def host_of(url: str) -> str:
    """Returns the host of a URL, which may have a token in its other parts."""
    try:
        return httpx.URL(url).host or "the URL"
    except httpx.InvalidURL:
        return "the URL"
