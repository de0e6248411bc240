"""HTTP requests to servers that may be hostile: replies are bounded, and messages have no secrets."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from pydantic import SecretStr

MOST_REPLY_BYTES = 4 << 10
"""The largest number of bytes that are read of the body of a reply. A server needs few words to refuse a request."""

LEAST_SECRET = 4
"""The length of the shortest secret that messages hide. Shorter secrets may be common words."""
LEAST_TOKEN = 8
"""The length of the shortest part of a URL that messages hide. Other parts are words such as ``write``."""
_PARTS = re.compile("[/?&=;]")


class ExchangeFailed(Exception):
    """A server gave no reply. The message names the host and the reason, and has no secret."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: the host, the status, and the first part of the body without words of the request and its URL.

    Attributes:
        date: the header ``Date``, the time of the server; empty if the reply has none.
    """

    host: str
    status: int
    text: str
    date: str = ""

    def __str__(self) -> str:
        return f"{self.host}: HTTP {self.status} {self.text[:200]}"

    @property
    def is_success(self) -> bool:
        """Whether the receiver confirms. A page does not: it is of a portal or a proxy in the receiver's place."""
        return 200 <= self.status < 300 and not self.text.lstrip().startswith("<")


def post(client: httpx.Client, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Reply:
    """Posts a body, and returns the reply. Redirects are not followed.

    Args:
        timeout_s: the longest time of each step, such as the connection or a wait for bytes. The body is read for at
            most twice this time.

    Raises:
        ExchangeFailed: there is no reply.
    """
    plain = {**headers, "Accept-Encoding": "identity"}  # a compressed reply could fill the memory
    host = _host_of(url)
    try:
        with client.stream("POST", url, content=body, headers=plain, timeout=timeout_s) as reply:
            ends_s, read = time.monotonic() + timeout_s, b""
            for part in reply.iter_raw():
                read += part
                if len(read) >= MOST_REPLY_BYTES or time.monotonic() >= ends_s:
                    break
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        raise ExchangeFailed(f"{host}: {failure(exc)}") from None
    text = read[:MOST_REPLY_BYTES].decode(errors="replace")
    target = httpx.URL(url)
    parts = _PARTS.split(f"{target.raw_path.decode()}/{target.path}/{target.userinfo.decode()}")
    sent = {word for value in headers.values() for word in value.split() if len(word) >= LEAST_SECRET}
    for word in sorted(sent.union(part for part in parts if len(part) >= LEAST_TOKEN), key=len, reverse=True):
        text = text.replace(word, "…")  # some servers quote what they refuse
    return Reply(host, reply.status_code, text, reply.headers.get("Date", ""))


def way_of(proxy: SecretStr | None) -> dict[str, Any]:
    """Returns the arguments of `httpx.Client` for a proxy, or for none: no variable of the environment names one."""
    return {"proxy": proxy and proxy.get_secret_value(), "trust_env": False}


def failure(exc: Exception) -> str:
    """Returns why an exchange has failed, without a message of the library that may quote a header, such as a token."""
    is_about_network = isinstance(exc, httpx.NetworkError | httpx.TimeoutException)
    return (str(exc) if is_about_network else "") or type(exc).__name__


def _host_of(url: str) -> str:
    """Returns the host of a URL, which may have a token in its other parts."""
    try:
        return httpx.URL(url).host or "the URL"
    except httpx.InvalidURL:
        return "the URL"
