"""How a client reaches a center: address, token, TLS, time limits; and the state of a live stream."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from httpx_sse import EventSource, ServerSentEvent
from tenacity import wait_random_exponential

from edgewater.base.errors import EdgewaterError, InvalidConfig, NotFound, ProtocolError
from edgewater.client.answers import Answer, Gap, Progress, from_json
from edgewater.client.requests import RequestRefused, Unreachable, checked, segment
from edgewater.runtime.http_exchange import failure
from edgewater.runtime.secret_files import read_secret_file

if TYPE_CHECKING:
    from edgewater.client.center import Query

DEFAULT_URL = "http://127.0.0.1:7480"
MAX_REPLY_BYTES = 1 << 30
"""A larger reply is an error. A server that is no center may send bytes without an end."""
SILENCE_S = 30.0  # limit: how late a dead stream is noticed
"""A live stream without any event for this time, in seconds, is broken, because `progress` arrives every few
seconds.
"""
RECONNECT = wait_random_exponential(multiplier=1, max=30)
"""The pauses between attempts to connect a live stream again (tenacity)."""
AGAIN = frozenset({429, 503})
"""Statuses after which a live stream tries again."""


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


def _summary(is_asked: bool) -> tuple[tuple[str, str], ...]:
    return (("summary", "true"),) if is_asked else ()


@dataclass(slots=True)
class LiveState:
    """The state of a live stream between two connections.

    Attributes:
        queries: the `Query` of each name in the stream.
        last_id: id of the last answer.
        failures: number of attempts to connect since the last event.
    """

    path: str
    params: tuple[tuple[str, str], ...]
    queries: Mapping[str, Query]
    last_id: str | None = None
    failures: int = 0

    @classmethod
    def of(cls, query: Query, params: tuple[tuple[str, str], ...], after: int | None, summary: bool) -> LiveState:
        """Returns the state of a stream of one query, which begins after the answer `after`."""
        params, last = (*params, *_summary(summary)), None if after is None else str(after)
        return cls(f"/v1/queries/{segment(query.name)}/live", params, {query.name: query}, last)

    @classmethod
    def of_several(cls, queries: Sequence[Query], after: int | None, summary: bool) -> LiveState:
        """Returns the state of a stream of several queries over one connection."""
        if not queries:
            raise NotFound("no query is registered that the token may read")
        named = (*(("query", query.name) for query in queries), *_summary(summary))
        return cls("/v1/live", named, {query.name: query for query in queries}, None if after is None else str(after))

    def request(self, http: httpx.Client) -> httpx.Request:
        headers = {"Last-Event-ID": self.last_id} if self.last_id is not None else {}
        limits = httpx.Timeout(SILENCE_S, connect=10.0)
        return http.build_request("GET", self.path, params=self.params, headers=headers, timeout=limits)

    def event(self, sse: ServerSentEvent) -> Answer | Progress | Gap | None:
        """Returns the event; None for a kind of event that this version does not know.

        Raises:
            NotFound: a query was deleted, or replaced by another query of its name.
            ProtocolError: the event cannot be read.
        """
        self.failures = 0
        try:
            data = json.loads(sse.data)
            match sse.event:
                case "answer":
                    query = self.queries[data["query"]]
                    event = from_json(data, query.spec, query.explain)
                    self.last_id = sse.id
                    return event
                case "progress":
                    live = {q["query"]: (q.get("first_version", q["version"]), q["version"]) for q in data["queries"]}
                    for query in self.queries.values():
                        first, newest = live.get(query.name, (0, -1))
                        if not first <= query.version <= newest:
                            raise NotFound(f"query {query.name}: version {query.version} is deleted")
                    return Progress(data)
                case "gap":
                    return Gap(int(data["after"]), int(data["through"]), str(data["reason"]))
        except (ValueError, KeyError, TypeError) as exc:
            raise ProtocolError(f"{self.path}: an event {sse.event[:50]!r} that cannot be read: {exc!r}") from None
        return None

    def pause_s(self, failure: Exception | None) -> float:
        """Returns the pause, in seconds, before the next attempt. Raises `failure` if another attempt cannot help."""
        if isinstance(failure, RequestRefused) and failure.status not in AGAIN:
            raise failure
        self.failures += 1
        seconds = RECONNECT(_Attempt(self.failures))  # type: ignore[arg-type]
        asked = failure.retry_after_s if isinstance(failure, RequestRefused) else None
        return max(seconds, asked or 0.0)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The attribute of a retry state that tenacity's `wait_random_exponential` needs."""

    attempt_number: int
