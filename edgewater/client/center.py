"""A center's queries, answers and live streams (`Center`)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import httpx
from httpx_sse import ServerSentEvent
from tenacity import wait_random_exponential

from edgewater.base.errors import InvalidRequest, NotFound, ProtocolError
from edgewater.client.answers import ARROW, Answer, Answers, Gap, Progress, from_json
from edgewater.client.connection import Connection, event_source, unreachable
from edgewater.client.requests import (
    PHASES,
    POLL_S,
    TABLE_TYPES,
    Draft,
    Moment,
    Params,
    Phase,
    Questions,
    RequestRefused,
    Unreachable,
    WaitTimeout,
    answers_of,
    borders,
    checked,
    given,
    json_of,
    moment,
    page_of,
    pages,
    put_headers,
    question_params,
    read_spec,
    revision_of,
    segment,
)
from edgewater.model.json_types import Groups, Key
from edgewater.model.replies import (
    DryRun,
    Edge,
    EdgeList,
    Explanation,
    QueryDetail,
    QueryStatus,
    Registered,
    Spec,
    StreamColumns,
    StreamList,
    TableDetail,
    TableInfo,
    TableList,
)

SILENCE_S = 30.0  # limit: how late a dead stream is noticed
"""A live stream without any event for this time, in seconds, is broken, because `progress` arrives every few
seconds.
"""
RECONNECT = wait_random_exponential(multiplier=1, max=30)
"""The pauses between attempts to connect a live stream again (tenacity)."""
AGAIN = frozenset({429, 503})
"""Statuses after which a live stream tries again."""


class Center:
    """A connection to a center. It is thread-safe. Close it, or use it as a context manager.

    Args:
        url: URL of the API. Default: EDGEWATER_URL, or http://127.0.0.1:7480.
        token: the token. Default: EDGEWATER_TOKEN, or the content of the file EDGEWATER_TOKEN_FILE.
        ca: file of the certificates that sign the center's certificate. Default: EDGEWATER_CA, or the CAs of the
            system.
        timeout: seconds without new data after which a request fails. A range of windows is read in many requests, so
            its size does not matter.

    Every method raises `Unreachable` if the center does not answer. If the center refuses, the method raises the error
    that the center states: an error of `edgewater.base.errors` (`NotFound`, `Conflict`, `InvalidRequest`,
    `InvalidQuery`, `Unauthenticated`, …), or `RequestRefused`.

    >>> with Center("http://127.0.0.1:1", timeout=2) as center:  # no center listens there
    ...     center.queries()
    Traceback (most recent call last):
    edgewater.client.requests.Unreachable: ...
    """

    def __init__(
        self, url: str | None = None, *, token: str | None = None, ca: str | Path | None = None, timeout: float = 30.0
    ) -> None:
        self._http = Connection(url, token, ca, timeout).open()

    @property
    def url(self) -> str:
        return str(self._http.base_url)

    def register(self, spec: Draft, *, lasts: str | None = None) -> Query:
        """Registers a query. If the same query is registered already, nothing changes. Raises Conflict if another query
        has its name: `put` changes a query.

        Args:
            spec: the query as a mapping, as YAML text, or as a file of YAML.
            lasts: the query ends after this much event time, such as ``1h``.
        """
        body, media, _ = read_spec(spec)
        headers = {"Content-Type": media}
        response = self.ask("POST", "/v1/queries", borders(None, lasts), content=body, headers=headers)
        return Query(json_of(response), self)

    def put(
        self, spec: Draft, *, at: Moment | None = None, version: int | None = None, lasts: str | None = None
    ) -> Query:
        """Changes a query, or registers it. No answer is deleted. If the same query is registered already, nothing
        changes.

        Args:
            at: the border, an event time. Windows that start before it keep the old version, and later windows get the
                new version. Default: the next start of a window that all edges learn in time.
            version: the newest version that the caller has read. Raises PreconditionFailed if the newest version
                differs.
            lasts: see `register`.
        """
        body, media, name = read_spec(spec)
        path, headers = f"/v1/queries/{segment(name)}", put_headers(media, version)
        return Query(json_of(self.ask("PUT", path, borders(at, lasts), content=body, headers=headers)), self)

    def dry_run(
        self,
        spec: Draft,
        *,
        change: bool = False,
        at: Moment | None = None,
        version: int | None = None,
        lasts: str | None = None,
    ) -> DryRun:
        """Returns what `register` would do, or what `put` would do with `change`. Registers nothing.

        The result states the border, and which edges would refuse the query.
        """
        body, media, name = read_spec(spec)
        params = (("dry_run", "true"), *borders(at, lasts))
        method, path = ("PUT", f"/v1/queries/{segment(name)}") if change else ("POST", "/v1/queries")
        found: DryRun = json_of(self.ask(method, path, params, content=body, headers=put_headers(media, version)))
        return found

    def query(self, name: str) -> Query:
        """Returns a registered query. Raises NotFound."""
        return Query(self.get(f"/v1/queries/{segment(name)}"), self)

    def queries(self) -> list[Query]:
        """Returns the queries that the token may read."""
        return [Query(each, self) for each in self.get("/v1/queries")["queries"]]

    def edges(self) -> list[Edge]:
        """Returns all edges: state, streams with watermarks, drops, backlog."""
        found: EdgeList = self.get("/v1/edges")
        return found["edges"]

    def streams(self) -> list[StreamColumns]:
        """Returns all streams: columns, who declared them, and edges with other columns."""
        found: StreamList = self.get("/v1/streams")
        return found["streams"]

    def tables(self) -> list[TableInfo]:
        """Returns the tables that queries may look up columns in."""
        found: TableList = self.get("/v1/tables")
        return found["tables"]

    def table(self, name: str) -> TableDetail:
        """Returns the newest version of a table, with its rows."""
        found: TableDetail = self.get(f"/v1/tables/{segment(name)}")
        return found

    def put_table(
        self, name: str, rows: Path | Sequence[Mapping[str, Key]], *, key: str | None = None, at: Moment | None = None
    ) -> TableInfo:
        """Makes a table, or changes it. Each running query that uses it gets a new version. Equal rows change nothing.

        Args:
            rows: a file of CSV with a header, NDJSON or Parquet, by the end of its name; or the rows.
            key: the column that tells the rows apart. Default: the first column.
            at: the border of the queries' new versions, as in `put`.
        """
        if isinstance(rows, Path):
            media = TABLE_TYPES.get(rows.suffix)
            if media is None:
                raise InvalidRequest("rows", str(rows), f"a file whose name ends in {', '.join(TABLE_TYPES)}")
            body = rows.read_bytes()
        else:
            media, body = "application/x-ndjson", "\n".join(json.dumps(dict(row)) for row in rows).encode()
        path, params = f"/v1/tables/{segment(name)}", given({"key": key, "at": moment(at, "at")})
        found: TableInfo = json_of(self.ask("PUT", path, params, content=body, headers={"Content-Type": media}))
        return found

    def delete_table(self, name: str) -> None:
        """Deletes a table. Raises Conflict while a running query uses it."""
        self.ask("DELETE", f"/v1/tables/{segment(name)}")

    def get(self, path: str, /, **params: str) -> Any:
        """Returns another resource as JSON, such as ``/v1/alarms``."""
        return json_of(self.ask("GET", path, tuple(params.items())))

    def send(self, method: str, path: str, body: bytes | None = None, media: str = "application/json") -> Any:
        """Sends a request for which the client has no method. Returns the reply as JSON; None if the reply is empty."""
        headers = {"Content-Type": media} if body is not None else {}
        response = self.ask(method, path, content=body, headers=headers)
        return json_of(response) if response.content else None

    def sql(self, statement: str) -> Any:
        """Runs a statement in SQL. Returns the reply of ``POST /v1/sql``, with `columns` and `rows` for SELECT and
        SHOW.
        """
        return self.send("POST", "/v1/sql", statement.encode(), "application/sql")

    def live(self, *names: str, after: int | None = None, summary: bool = False) -> Iterator[Answer | Progress | Gap]:
        """Yields answers of several queries over one connection, as `Query.live` does for one query.

        Args:
            names: the queries. Default: the queries that are registered now and that the token may read.
            after: id of an answer of any query. The stream begins after it.
            summary: see `Query.live`.

        Raises NotFound when one of the queries is deleted.
        """
        queries = [self.query(name) for name in names] if names else self.queries()
        return self._live(_LiveState.of_several(queries, after, summary))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Center({self.url!r})"

    def ask(
        self,
        method: str,
        path: str,
        params: Params = (),
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        missing: bool = False,
    ) -> httpx.Response:
        """Returns the successful reply to a request. Raises the error that the reply states.

        Args:
            missing: see `checked`.
        """
        try:
            response = self._http.request(method, path, params=params or None, content=content, headers=headers)
        except httpx.TransportError as exc:
            raise unreachable(self._http, exc) from exc
        return checked(response, missing)

    def _live(self, state: _LiveState) -> Iterator[Answer | Progress | Gap]:
        while True:
            failure: Exception | None = None
            try:
                with closing(self._http.send(state.request(self._http), stream=True)) as response:
                    if not response.is_success:
                        response.read()
                    for sse in event_source(response).iter_sse():
                        if (event := state.event(sse)) is not None:
                            yield event
            except (httpx.TransportError, RequestRefused, Unreachable) as exc:
                failure = exc
            time.sleep(state.pause_s(failure))


@dataclass(frozen=True, slots=True, repr=False)
class Query:
    """A query as the center returned it when it was registered or read.

    Attributes:
        registered: name, version, spec and registered_at; also notes if the query has just been registered.
    """

    registered: Registered
    center: Center

    @property
    def name(self) -> str:
        return str(self.registered["name"])

    @property
    def path(self) -> str:
        """The path of its resource."""
        return f"/v1/queries/{segment(self.name)}"

    @property
    def version(self) -> int:
        """The version. Each change of the query makes a new version."""
        return int(self.registered["version"])

    @property
    def spec(self) -> Spec:
        return self.registered["spec"]

    @property
    def notes(self) -> list[str]:
        """Notes about limits of the query that its writer may not expect."""
        return list(self.registered.get("notes") or [])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, version {self.version})"

    def latest(self, group: Groups | None = None, **questions: Unpack[Questions]) -> Answer:
        """Returns the newest answer to the last window. Raises NotFound if there is none; the message states the
        reason.

        Args:
            group: returns only groups with these values: column -> value, or column -> list of values.
            questions: the API's question parameters: measure, quantile, item, contains, rank, range, top, values,
                confidence, compute, having, order, limit_groups. Each may be a list.
        """
        return self._answer(self._arrow("latest", question_params(group, questions)))

    def window(
        self, start: Moment, revision: int | None = None, group: Groups | None = None, **questions: Unpack[Questions]
    ) -> Answer:
        """Returns the answer to one window. Raises NotFound.

        Args:
            revision: the revision; None for the newest revision.
        """
        params = (*question_params(group, questions), *revision_of(revision))
        return self._answer(self._arrow(_window_path(start, "start"), params))

    def windows(
        self,
        start: Moment | None = None,
        end: Moment | None = None,
        group: Groups | None = None,
        *,
        every: str | None = None,
        zone: str | None = None,
        **questions: Unpack[Questions],
    ) -> Answers:
        """Returns the newest answers to the windows that start in [start, end).

        Args:
            every: merges the windows of each interval. It is a duration such as ``1h``, or ``day``, ``week``,
                ``month``, ``quarter`` or ``year``.
            zone: the time zone of days and longer units, such as ``Europe/Berlin``. Default: UTC.
            group, questions: see `latest`.
        """
        span = {"start": moment(start, "start"), "end": moment(end, "end"), "every": every, "zone": zone}
        params = (*question_params(group, questions), *given(span))
        resource = "windows" if every is None else "rollup"
        read = pages(lambda page: self._arrow(resource, (*params, *page)), time.monotonic)
        return answers_of(read, self.spec, self.explain)

    def wait(
        self,
        window: Moment,
        phase: Phase = "final",
        timeout: float = 60.0,
        group: Groups | None = None,
        **questions: Unpack[Questions],
    ) -> Answer:
        """Waits until a window has reached a phase, and returns its answer.

        Raises WaitTimeout, whose message says what the query waits for.
        """
        resource, params = _window_path(window, "window"), question_params(group, questions)
        if phase not in PHASES:
            raise InvalidRequest("phase", phase, "early, complete or final")
        deadline = time.monotonic() + timeout
        known, reached = dict[str, str](), "no answer"
        while True:
            try:
                response = self._arrow(resource, params, known, missing=True)
                if response.status_code == 200:
                    answer = self._answer(response)
                    if PHASES.index(answer.phase) >= PHASES.index(phase):
                        return answer
                    known, reached = {"If-None-Match": response.headers["etag"]}, answer.phase
                elif response.status_code == 404:
                    self.status()  # raises NotFound if the query was deleted
            except Unreachable:  # for example while the center restarts
                if time.monotonic() >= deadline:
                    raise
            if time.monotonic() >= deadline:
                why = self.status()["reason"]
                text = f"{reached} after {timeout:g} s, not {phase}" + (f": {why}" if why else "")
                raise WaitTimeout(f"query {self.name}, window {moment(window, 'window')}: {text}")
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))

    def status(self) -> QueryStatus:
        """Returns whether the query has answers. If not, returns what it waits for, since when, and what to do."""
        found: QueryStatus = self.center.get(f"{self.path}/status")
        return found

    def detail(self) -> QueryDetail:
        """Returns, for each edge, its state, whether it accepts the query, and how much it has shipped."""
        found: QueryDetail = self.center.get(self.path)
        return found

    def explain(
        self, window: Moment, group: Groups | None = None, revision: int | None = None, **questions: Unpack[Questions]
    ) -> Explanation:
        """Returns what the error of a value in a window consists of: by cause, by edge, by revision.

        Default: the first measure, and the group with the widest interval.
        """
        params = (*question_params(group, questions), *revision_of(revision))
        path = f"{self.path}/{_window_path(window, 'window')}/explain"
        found: Explanation = json_of(self.center.ask("GET", path, params))
        return found

    def delete(self) -> None:
        """Deletes the query and its answers."""
        self.center.ask("DELETE", self.path)

    def live(
        self,
        group: Groups | None = None,
        after: int | None = None,
        *,
        summary: bool = False,
        **questions: Unpack[Questions],
    ) -> Iterator[Answer | Progress | Gap]:
        """Yields answers when the center publishes them, without an end. It begins with the latest answer, or after an
        id.

        Args:
            after: id of the answer after which the stream begins; None to begin with the latest answer.
            summary: answers have only the 5 groups with the widest intervals.

        After a lost connection, such as a restart of the center, the stream continues after the last answer. Raises
        NotFound when the query is deleted.
        """
        return self.center._live(_LiveState.of(self, question_params(group, questions), after, summary))

    def _arrow(
        self, resource: str, params: Params, headers: Mapping[str, str] | None = None, *, missing: bool = False
    ) -> httpx.Response:
        """Requests answers as Arrow."""
        accepting = {"Accept": ARROW, **(headers or {})}
        return self.center.ask("GET", f"{self.path}/{resource}", params, headers=accepting, missing=missing)

    def _answer(self, response: httpx.Response) -> Answer:
        return answers_of([page_of(response)], self.spec, self.explain)[0]


def _window_path(start: Moment, name: str) -> str:
    return f"windows/{segment(moment(start, name) or '')}"


def _summary(is_asked: bool) -> tuple[tuple[str, str], ...]:
    return (("summary", "true"),) if is_asked else ()


@dataclass(slots=True)
class _LiveState:
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
    def of(cls, query: Query, params: tuple[tuple[str, str], ...], after: int | None, summary: bool) -> _LiveState:
        """Returns the state of a stream of one query, which begins after the answer `after`."""
        params, last = (*params, *_summary(summary)), None if after is None else str(after)
        return cls(f"/v1/queries/{segment(query.name)}/live", params, {query.name: query}, last)

    @classmethod
    def of_several(cls, queries: Sequence[Query], after: int | None, summary: bool) -> _LiveState:
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
