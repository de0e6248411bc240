"""Protects servers without authentication on loopback from web pages in a browser of the same machine.

With DNS rebinding, the name of a page resolves to 127.0.0.1, and the browser sends this name as `Host`. If a page of
another origin sends a request that changes something, the browser sends this origin as `Origin`. Neither of them is a
name of this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

READS = ("GET", "HEAD", "OPTIONS")


class LocalHosts:
    """Middleware that refuses requests whose `Host` or `Origin` is another machine.

    Args:
        hosts: names that are accepted in addition to the names of loopback.
        key: the configuration key of `hosts`, for the message.
        refuse: makes the response from a message.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], key: str, refuse: Callable[[Scope, str], ASGIApp]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._key = key
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            named = [("Host", f"//{headers['host']}")] if headers.get("host") else []  # browsers always send it
            if scope["method"] not in READS and "origin" in headers:
                named.append(("Origin", headers["origin"]))
            for header, url in named:
                if not self._is_accepted(url):
                    app = self._refuse(
                        scope,
                        f"{header} {url.removeprefix('//')[:200]!r} is not this machine; without credentials expected"
                        f" localhost, a loopback address or one of {self._key}",
                    )
        await app(scope, receive, send)

    def _is_accepted(self, url: str) -> bool:
        try:
            host = urlsplit(url).hostname or ""
            return host in self._hosts or host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False
