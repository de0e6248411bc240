"""A center's queries, answers and live streams (`Center`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from edgewater.client import requests as flows
from edgewater.client.answers import Answer, Answers, Gap, Progress, from_table
from edgewater.client.connection import Connection, LiveState, bounded, built, event_source, unreachable
from edgewater.client.requests import IfExists, Moment, Questions, moment, question_params, segment
from edgewater.model import replies
from edgewater.model.json_types import Document, Groups

T = TypeVar("T")


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
    that the center states: an error of `edgewater.model.errors` (`NotFound`, `Conflict`, `InvalidRequest`,
    `InvalidQuery`, `Unauthenticated`, …), or `RequestRefused`.

    >>> with Center("http://127.0.0.1:1", timeout=2) as center:  # no center listens there
    ...     center.queries()
    Traceback (most recent call last):
    edgewater.client.requests.Unreachable: ...
    """

    def __init__(
        self, url: str | None = None, *, token: str | None = None, ca: str | Path | None = None, timeout: float = 30.0
    ) -> None:
        self._http = Connection(url, token, ca, timeout).open(httpx.Client, bounded)

    @property
    def url(self) -> str:
        return str(self._http.base_url)

    def register(self, spec: Document | str | Path, if_exists: IfExists = "same", *, lasts: str | None = None) -> Query:
        """Registers a query.

        Args:
            spec: the query as a mapping, as YAML text, or as a file of YAML.
            if_exists: what to do if a query of the name is registered. `same`: raises Conflict unless it is the same
                query. `error`: raises Conflict. `replace`: another query gets a new version, as with `put`.
            lasts: the query ends after this much event time, such as ``1h``.
        """
        return Query(self._run(flows.register(spec, if_exists, lasts)), self)

    def put(
        self, spec: Document | str | Path, *, at: Moment | None = None, version: int | None = None,
        lasts: str | None = None,
    ) -> Query:  # fmt: skip
        """Changes a query, or registers it. No answer is deleted. If the same query is registered already, nothing
        changes.

        Args:
            at: the border, an event time. Windows that start before it keep the old version, and later windows get the
                new version. Default: the next start of a window that all edges learn in time.
            version: the newest version that the caller has read. Raises PreconditionFailed if the newest version
                differs.
            lasts: see `register`.
        """
        return Query(self._run(flows.put(spec, at, version, lasts)), self)

    def dry_run(
        self, spec: Document | str | Path, *, change: bool = False, at: Moment | None = None,
        version: int | None = None, lasts: str | None = None,
    ) -> replies.DryRun:  # fmt: skip
        """Returns what `register` would do, or what `put` would do with `change`. Registers nothing.

        The result states the border, and which edges would refuse the query.
        """
        return self._run(flows.dry_run(spec, change, at, version, lasts))

    def query(self, name: str) -> Query:
        """Returns a registered query. Raises NotFound."""
        return Query(self._run(flows.get(f"/v1/queries/{segment(name)}")), self)

    def queries(self) -> list[Query]:
        """Returns the queries that the token may read."""
        return [Query(q, self) for q in self._run(flows.get("/v1/queries"))["queries"]]

    def live(
        self, *names: str, after: int | None = None, changes: bool = False, summary: bool = False
    ) -> Iterator[Answer | Progress | Gap]:
        """Yields answers of several queries over one connection, as `Query.live` does for one query.

        Args:
            names: the queries. Default: the queries that are registered now and that the token may read.
            after: id of an answer of any query. The stream begins after it.
            changes, summary: see `Query.live`.

        Raises NotFound when one of the queries is deleted.
        """
        queries = [self.query(name) for name in names] if names else self.queries()
        return self._live(LiveState.of_several(queries, after, changes, summary))

    def edges(self) -> list[replies.Edge]:
        """Returns all edges: state, streams with watermarks, drops, backlog."""
        return self._run(flows.reply("/v1/edges", replies.EdgeList))["edges"]

    def streams(self) -> list[replies.StreamColumns]:
        """Returns all streams: columns, who declared them, and edges with other columns."""
        return self._run(flows.reply("/v1/streams", replies.StreamList))["streams"]

    def get(self, path: str, **params: str) -> Any:
        """Returns another resource as JSON, such as ``/v1/alarms``."""
        return self._run(flows.get(path, tuple(params.items())))

    def send(self, method: str, path: str, body: bytes | None = None, media: str = "application/json") -> Any:
        """Sends a request for which the client has no method. Returns the reply as JSON; None if the reply is empty."""
        return self._run(flows.send(method, path, body, media))

    def sql(self, statement: str) -> Any:
        """Runs a statement in SQL. Returns the reply of ``POST /v1/sql``, with `columns` and `rows` for SELECT and
        SHOW.
        """
        return self._run(flows.sql(statement))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Center({self.url!r})"

    def _run(self, flow: flows.Flow[T]) -> T:
        with closing(flow):
            try:
                request = next(flow)
                while True:
                    try:
                        reply = self._perform(request)
                    except Exception as exc:
                        request = flow.throw(exc)
                    else:
                        request = flow.send(reply)
            except StopIteration as done:
                value: T = done.value
                return value

    def _perform(self, request: flows.Request | flows.Pause) -> Any:
        if isinstance(request, flows.Pause):
            return time.sleep(request.seconds)
        try:
            return flows.checked(self._http.send(built(self._http, request)), request.missing)
        except httpx.TransportError as exc:
            raise unreachable(self._http, exc) from exc

    def _live(self, state: LiveState) -> Iterator[Answer | Progress | Gap]:
        while True:
            failure: Exception | None = None
            try:
                with closing(self._http.send(state.request(self._http), stream=True)) as response:
                    if not response.is_success:
                        response.read()
                    for sse in event_source(response).iter_sse():
                        if (event := state.event(sse)) is not None:
                            yield event
            except (httpx.TransportError, flows.RequestRefused, flows.Unreachable) as exc:
                failure = exc
            time.sleep(state.pause(failure).seconds)


@dataclass(frozen=True, slots=True)
class QueryData:
    """A query as the center returned it when it was registered or read.

    Attributes:
        registered: name, version, spec and registered_at; also notes if the query has just been registered.
    """

    registered: replies.Registered

    @property
    def name(self) -> str:
        return str(self.registered["name"])

    @property
    def version(self) -> int:
        """The version. Each change of the query makes a new version."""
        return int(self.registered["version"])

    @property
    def spec(self) -> replies.Spec:
        return self.registered["spec"]

    @property
    def notes(self) -> list[str]:
        """Notes about limits of the query that its writer may not expect."""
        return list(self.registered.get("notes") or [])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, version {self.version})"


@dataclass(frozen=True, slots=True, repr=False)
class Query(QueryData):
    """A registered query at a center."""

    center: Center

    def latest(self, group: Groups | None = None, **questions: Unpack[Questions]) -> Answer:
        """Returns the newest answer to the last window. Raises NotFound if there is none; the message states the
        reason.

        Args:
            group: returns only groups with these values: column -> value, or column -> list of values.
            questions: the API's question parameters: measure, quantile, item, contains, rank, range, top, values,
                confidence, compute, having, order, limit_groups. Each may be a list.
        """
        return self._run(flows.latest(self.name, question_params(group, questions), self._build))

    def windows(
        self, start: Moment | None = None, end: Moment | None = None, group: Groups | None = None, *,
        every: str | None = None, zone: str | None = None, **questions: Unpack[Questions],
    ) -> Answers:  # fmt: skip
        """Returns the newest answers to the windows that start in [start, end).

        Args:
            every: merges the windows of each interval. It is a duration such as ``1h``, or ``day``, ``week``,
                ``month``, ``quarter`` or ``year``.
            zone: the time zone of days and longer units, such as ``Europe/Berlin``. Default: UTC.
            group, questions: see `latest`.
        """
        bounds, params = (
            (moment(start, "start"), moment(end, "end")),
            question_params(group, questions),
        )
        return self._run(flows.windows(self.name, *bounds, time.monotonic, params, self._build, every=every, zone=zone))

    def window(
        self,
        start: Moment,
        revision: int | None = None,
        group: Groups | None = None,
        **questions: Unpack[Questions],
    ) -> Answer:
        """Returns the answer to one window. Raises NotFound.

        Args:
            revision: the revision; None for the newest revision.
        """
        at = moment(start, "start") or ""
        return self._run(flows.window(self.name, at, revision, question_params(group, questions), self._build))

    def wait(
        self, window: Moment, phase: flows.Phase = "final", timeout: float = 60.0, group: Groups | None = None,
        **questions: Unpack[Questions],
    ) -> Answer:  # fmt: skip
        """Waits until a window has reached a phase, and returns its answer.

        Raises WaitTimeout, whose message says what the query waits for.
        """
        at, params = moment(window, "window") or "", question_params(group, questions)
        return self._run(flows.wait(self.name, at, phase, timeout, time.monotonic, params, self._build))

    def live(
        self, group: Groups | None = None, after: int | None = None, *, changes: bool = False,
        summary: bool = False, **questions: Unpack[Questions],
    ) -> Iterator[Answer | Progress | Gap]:  # fmt: skip
        """Yields answers when the center publishes them, without an end. It begins with the latest answer, or after an
        id.

        Args:
            after: id of the answer after which the stream begins; None to begin with the latest answer.
            changes: the center sends only the groups of a window that have changed. The yielded answers are still
                complete, with new groups at the end.
            summary: answers have only the 5 groups with the widest intervals.

        After a lost connection, such as a restart of the center, the stream continues after the last answer. Raises
        NotFound when the query is deleted.
        """
        return self.center._live(LiveState.of(self, question_params(group, questions), after, changes, summary))

    def status(self) -> replies.QueryStatus:
        """Returns whether the query has answers. If not, returns what it waits for, since when, and what to do."""
        return self._run(flows.reply(f"/v1/queries/{segment(self.name)}/status", replies.QueryStatus))

    def detail(self) -> replies.QueryDetail:
        """Returns, for each edge, its state, whether it accepts the query, and how much it has shipped."""
        return self._run(flows.reply(f"/v1/queries/{segment(self.name)}", replies.QueryDetail))

    def explain(
        self,
        window: Moment,
        group: Groups | None = None,
        revision: int | None = None,
        **questions: Unpack[Questions],
    ) -> replies.Explanation:
        """Returns what the error of a value in a window consists of: by cause, by edge, by revision.

        Default: the first measure, and the group with the widest interval.
        """
        at = moment(window, "window") or ""
        return self._run(flows.explain(self.name, at, revision, question_params(group, questions)))

    def delete(self) -> None:
        """Deletes the query and its answers."""
        self.center.send("DELETE", f"/v1/queries/{segment(self.name)}")

    def _run(self, flow: flows.Flow[T]) -> T:
        return self.center._run(flow)

    @property
    def _build(self) -> flows.Build:
        return partial(from_table, spec=self.spec, explain_with=self.explain)
