"""How a client reaches a center: address, token, TLS, and time limits."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import EventSource

from edgewater.base.errors import EdgewaterError, InvalidConfig, ProtocolError
from edgewater.client.requests import Unreachable, checked
from edgewater.runtime.http_exchange import failure
from edgewater.runtime.secret_files import read_secret_file

DEFAULT_URL = "http://127.0.0.1:7480"
MAX_REPLY_BYTES = 1 << 30
"""A larger reply is an error. A server that is no center may send bytes without an end."""


def _with_scheme(address: str, where: str, token: str | None) -> str:
    """Returns ``http://host:port`` for ``host:port``, and any other address unchanged.

    Args:
        where: the setting that has the address, for the error.

    Raises:
        InvalidConfig: the address has no scheme, and a token would leave this machine without TLS.
    """
    if "://" in address:
        return address
    from edgewater.runtime.configuration import is_loopback, split_address  # pydantic, which few clients need

    try:
        split_address(address)
    except ValueError:
        return address
    if token is not None and not is_loopback(address):
        accepted = f"https://{address}, or http://{address} to send the token without TLS"
        raise InvalidConfig(where, address, accepted, "a token is sent, and the address has no scheme")
    return f"http://{address}"


@dataclass(frozen=True, slots=True)
class Connection:
    """The settings of a client.

    Attributes:
        url: URL of the API, or its ``host:port``; None for EDGEWATER_URL, or the default address on loopback.
        token: the token; None for EDGEWATER_TOKEN, or the content of the file EDGEWATER_TOKEN_FILE.
        ca: file of the certificates that sign the center's certificate; None for the CAs of the system.
        timeout: seconds without new data after which a request fails.
    """

    url: str | None = None
    token: str | None = field(default=None, repr=False)
    ca: str | Path | None = None
    timeout: float = 30.0

    def open(self) -> httpx.Client:
        """Returns a client of httpx. Raises InvalidConfig."""
        address = self.url or os.environ.get("EDGEWATER_URL") or DEFAULT_URL
        where = "url" if self.url else "EDGEWATER_URL"
        token = self._token()
        try:
            url = httpx.URL(_with_scheme(address, where, token))
        except httpx.InvalidURL as exc:
            raise InvalidConfig(where, address, f"an address such as {DEFAULT_URL}", str(exc)) from None
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidConfig(where, address, f"an address such as {DEFAULT_URL}")
        headers = {"User-Agent": f"edgewater/{version('edgewater')}", "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return httpx.Client(
            base_url=url.copy_with(userinfo=b""),  # messages quote the URL
            auth=(url.username, url.password) if url.userinfo else None,
            headers=headers,
            timeout=self.timeout,
            verify=self._verify(),
            trust_env=False,  # variables such as http_proxy do not decide where the token goes
            proxy=_proxy(),
            event_hooks={"response": [_bounded]},
        )

    def _token(self) -> str | None:
        if self.token is not None:
            return _plain("token", self.token)
        if token := os.environ.get("EDGEWATER_TOKEN"):
            return _plain("EDGEWATER_TOKEN", token)
        path = os.environ.get("EDGEWATER_TOKEN_FILE")
        if not path:
            return None
        try:
            return _plain("EDGEWATER_TOKEN_FILE", read_secret_file(Path(path)))
        except (OSError, ValueError) as exc:
            raise InvalidConfig("EDGEWATER_TOKEN_FILE", path, "a readable file with a token", str(exc)) from None

    def _verify(self) -> ssl.SSLContext | bool:
        path = self.ca or os.environ.get("EDGEWATER_CA")
        if not path:
            return True
        try:
            return ssl.create_default_context(cafile=str(path))
        except (OSError, ssl.SSLError) as exc:
            accepted = "a file of certificates in PEM"
            raise InvalidConfig("ca" if self.ca else "EDGEWATER_CA", str(path), accepted, str(exc)) from None


def _proxy() -> httpx.Proxy | None:
    """Returns the proxy that EDGEWATER_PROXY names. Raises InvalidConfig."""
    url = os.environ.get("EDGEWATER_PROXY")
    if not url:
        return None
    try:
        return httpx.Proxy(url)
    except (ValueError, httpx.InvalidURL) as exc:
        raise InvalidConfig("EDGEWATER_PROXY", "…", "a URL such as http://proxy.example.com:3128", str(exc)) from None


def _plain(where: str, token: str) -> str:
    """Returns a token without white space around it. The error does not show the token."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidConfig(where, "…", "a token: printable ASCII characters without spaces")
    return token


class _Bounded(httpx.SyncByteStream):
    """The body of a reply, of at most `MAX_REPLY_BYTES`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._left = MAX_REPLY_BYTES

    def _counted(self, part: bytes) -> bytes:
        self._left -= len(part)
        if self._left < 0:
            raise httpx.ReadError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB; ask for fewer windows")
        return part

    def __iter__(self) -> Iterator[bytes]:
        return map(self._counted, self._inner)

    def close(self) -> None:
        self._inner.close()


def _bounded(response: httpx.Response) -> None:
    """Limits the size of a reply. A stream of events has no end. A hook of `httpx.Client`."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = _Bounded(response.stream)


def unreachable(http: httpx.Client, exc: httpx.TransportError) -> EdgewaterError:
    """Returns the error for a request without a reply."""
    base = http.base_url
    if isinstance(exc, httpx.TimeoutException):
        seconds = http.timeout.read
        return Unreachable(
            f"the center at {base} did not answer within {seconds:g} s; if it is only slow, set a longer time-out:"
            " the argument timeout= of Center, or the option --timeout, in seconds",
            timeout_s=seconds,
        )
    what, proxy = failure(exc), _proxy()
    if proxy is not None:
        what = f"{what}, through EDGEWATER_PROXY {proxy.url}"
    return Unreachable(f"cannot reach the center at {base}: {what}; is it running? EDGEWATER_URL is its address")


def event_source(response: httpx.Response) -> EventSource:
    """Returns the events of a reply.

    Raises the error that the reply states, and ProtocolError if the reply is no stream of events.
    """
    checked(response)
    media = response.headers.get("content-type", "").partition(";")[0]
    if media != "text/event-stream":
        raise ProtocolError(
            f"{response.request.url.copy_with(query=None)}: the reply is {media or 'nothing'}, no stream of events"
        )
    return EventSource(response)
