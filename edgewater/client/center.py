"""`Center`: a center's queries, answers and live streams."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from edgewater.client import requests as flows
from edgewater.client.answers import Answer, Answers, Gap, Progress, from_table
from edgewater.client.connection import Connection, LiveState, arguments, event_source, unreachable
from edgewater.client.requests import Flow, IfExists, Moment, Pause, Phase, checked, moment, question_params, segment

T = TypeVar("T")


class Center:
    """A connection to a center. Thread-safe; close it, or use it as a context manager.

    Args:
        url: of the API. Default: EDGEWATER_URL, or http://127.0.0.1:7480.
        token: Default: EDGEWATER_TOKEN, or the content of the file EDGEWATER_TOKEN_FILE.
        ca: file of the certificates that sign the center's. Default: EDGEWATER_CA, or those of the system.
        timeout: seconds that a request may take without news. A range of windows is read in many requests, so its size
            does not matter.

    Every method raises `Unreachable` if the center does not answer, and the error that it states if it refuses:
    `edgewater.model.errors` (`NotFound`, `Conflict`, `InvalidRequest`, `InvalidQuery`, `Unauthenticated`, …) or
    `RequestRefused`.
    """

    def __init__(
        self, url: str | None = None, *, token: str | None = None, ca: str | Path | None = None, timeout: float = 30.0
    ) -> None:
        self._http = httpx.Client(**Connection(url, token, ca, timeout).options())

    @property
    def url(self) -> str:
        return str(self._http.base_url)

    def register(
        self, spec: Mapping[str, Any] | str | Path, if_exists: IfExists = "same", *, lasts: str | None = None
    ) -> Query:
        """Registers a query: a mapping, YAML text, or a file of YAML.

        Args:
            if_exists: `same`: a query that is registered already must be the same one (Conflict otherwise); `error`: it
                is a Conflict in any case; `replace`: another one gets a new version, as `put` gives it.
            lasts: the query ends by itself after so much event time, such as ``1h``.
        """
        return Query(self._run(flows.register(spec, if_exists, lasts)), self)

    def put(
        self, spec: Mapping[str, Any] | str | Path, *, at: Moment | None = None, version: int | None = None,
        lasts: str | None = None,
    ) -> Query:  # fmt: skip
        """Changes a query, or registers it. No answer is deleted. The same query again changes nothing.

        Args:
            at: the border: windows that start before it keep the old version, later ones get the new version. Default:
                the next start of a window of which all edges hear in time.
            version: the newest version, as the caller has read it. Raises PreconditionFailed if it is another one.
            lasts: as of `register`.
        """
        return Query(self._run(flows.put(spec, at, version, lasts)), self)

    def dry_run(
        self, spec: Mapping[str, Any] | str | Path, *, change: bool = False, at: Moment | None = None,
        version: int | None = None, lasts: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns what `register` would do, or `put` with `change`: the border, and which edges would refuse the query.

        Nothing is registered.
        """
        return self._run(flows.dry_run(spec, change, at, version, lasts))

    def query(self, name: str) -> Query:
        """A registered query. Raises NotFound."""
        return Query(self._run(flows.get(f"/v1/queries/{segment(name)}")), self)

    def queries(self) -> list[Query]:
        """The queries that the token may read."""
        return [Query(q, self) for q in self._run(flows.get("/v1/queries"))["queries"]]

    def live(
        self, *names: str, after: int | None = None, changes: bool = False, summary: bool = False
    ) -> Iterator[Answer | Progress | Gap]:
        """Answers of several queries over one connection, as `Query.live` gives those of one.

        Args:
            names: Default: those that are registered now and that the token may read.
            after: id of an answer of any query; the stream begins after it.
            changes, summary: as of `Query.live`.

        Raises NotFound when one of them is deleted.
        """
        queries = [self.query(name) for name in names] if names else self.queries()
        return self._live(LiveState.of_several(queries, after, changes, summary))

    def edges(self) -> list[dict[str, Any]]:
        """All edges: state, streams with watermarks, drops, backlog."""
        return list(self._run(flows.get("/v1/edges"))["edges"])

    def streams(self) -> list[dict[str, Any]]:
        """All streams: columns, who declared them, and edges that differ."""
        return list(self._run(flows.get("/v1/streams"))["streams"])

    def get(self, path: str, **params: str) -> Any:
        """Any other resource as JSON, such as ``/v1/alarms``."""
        return self._run(flows.get(path, tuple(params.items())))

    def send(self, method: str, path: str, body: bytes | None = None, media: str = "application/json") -> Any:
        """Any other change; returns the reply as JSON, None if it is empty."""
        return self._run(flows.send(method, path, body, media))

    def sql(self, statement: str) -> Any:
        """Runs a statement in SQL; returns the reply of ``POST /v1/sql``: `columns` and `rows` of SELECT and SHOW."""
        return self._run(flows.sql(statement))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Center({self.url!r})"

    def _run(self, flow: Flow[T]) -> T:
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

    def _perform(self, request: flows.Request | Pause) -> Any:
        if isinstance(request, Pause):
            return time.sleep(request.seconds)
        try:
            return checked(self._http.request(**arguments(request)), request.missing)
        except httpx.TransportError as exc:
            raise unreachable(self._http, exc) from exc

    def _live(self, state: LiveState) -> Iterator[Answer | Progress | Gap]:
        while True:
            failure: Exception | None = None
            try:
                with self._http.stream(**state.arguments()) as response:
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
    """What the center says of a query when it is registered or read.

    Attributes:
        registered: name, version, spec, registered_at; notes of one that has just been registered.
    """

    registered: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.registered["name"])

    @property
    def version(self) -> int:
        """Each change makes another one."""
        return int(self.registered["version"])

    @property
    def spec(self) -> Mapping[str, Any]:
        spec: Mapping[str, Any] = self.registered["spec"]
        return spec

    @property
    def notes(self) -> list[str]:
        """What the query does not do, if it may be unexpected."""
        return list(self.registered.get("notes") or [])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, version {self.version})"


@dataclass(frozen=True, slots=True, repr=False)
class Query(QueryData):
    """A registered query at a center."""

    center: Center

    def latest(self, group: Mapping[str, Any] | None = None, **questions: Any) -> Answer:
        """The newest answer to the last window. Raises NotFound: none yet; the message says what the query waits for.

        Args:
            group: only groups with these values: column -> value, or a list of values.
            questions: the API's question parameters: measure, quantile, item, contains, rank, range, top, values,
                confidence, compute, having, order, limit_groups. Each may be a list.
        """
        return self._run(flows.latest(self.name, question_params(group, questions), self._build))

    def windows(
        self, start: Moment | None = None, end: Moment | None = None, group: Mapping[str, Any] | None = None, *,
        every: str | None = None, zone: str | None = None, **questions: Any,
    ) -> Answers:  # fmt: skip
        """The newest answers to the windows that start in [start, end).

        Args:
            every: merges the windows of each interval: a duration such as ``1h``, or ``day``, ``week``, ``month``,
                ``quarter`` or ``year``.
            zone: the time zone of days and longer units, such as ``Europe/Berlin``; default: UTC.
        """
        bounds, params = (moment(start, "start"), moment(end, "end")), question_params(group, questions)
        return self._run(flows.windows(self.name, *bounds, time.monotonic, params, self._build, every=every, zone=zone))

    def window(
        self, start: Moment, revision: int | None = None, group: Mapping[str, Any] | None = None, **questions: Any
    ) -> Answer:
        """The answer to one window, in a revision (default: the newest). Raises NotFound."""
        at = moment(start, "start") or ""
        return self._run(flows.window(self.name, at, revision, question_params(group, questions), self._build))

    def wait(
        self, window: Moment, phase: Phase = "final", timeout: float = 60.0, group: Mapping[str, Any] | None = None,
        **questions: Any,
    ) -> Answer:  # fmt: skip
        """Waits until a window has reached a phase. Raises WaitTimeout, which says what the query waits for."""
        at, params = moment(window, "window") or "", question_params(group, questions)
        return self._run(flows.wait(self.name, at, phase, timeout, time.monotonic, params, self._build))

    def live(
        self, group: Mapping[str, Any] | None = None, after: int | None = None, *, changes: bool = False,
        summary: bool = False, **questions: Any,
    ) -> Iterator[Answer | Progress | Gap]:  # fmt: skip
        """Answers as they are given, without an end: the latest first, or those after an id.

        Args:
            changes: the center sends only the groups that have changed in a window. The answers given here are whole,
                with new groups at the end.
            summary: answers have only the 5 groups with the widest intervals.


        After a lost connection, such as a center that restarts, it continues after the last answer. Raises NotFound
        when the query is deleted.
        """
        return self.center._live(LiveState.of(self, question_params(group, questions), after, changes, summary))

    def status(self) -> dict[str, Any]:
        """Whether the query has answers; if not, what it waits for, since when, and what to do."""
        return dict(self._run(flows.get(f"/v1/queries/{segment(self.name)}/status")))

    def detail(self) -> dict[str, Any]:
        """What each edge says of the query, and has shipped."""
        return dict(self._run(flows.get(f"/v1/queries/{segment(self.name)}")))

    def explain(
        self, window: Moment, group: Mapping[str, Any] | None = None, revision: int | None = None, **questions: Any
    ) -> dict[str, Any]:
        """What the error of a value in a window is made of: by cause, by edge, by revision.

        Default: the first measure, and of several groups the one with the widest interval.
        """
        at = moment(window, "window") or ""
        return self._run(flows.explain(self.name, at, revision, question_params(group, questions)))

    def delete(self) -> None:
        """Deletes the query and its answers."""
        self.center.send("DELETE", f"/v1/queries/{segment(self.name)}")

    def _run(self, flow: Flow[T]) -> T:
        return self.center._run(flow)

    @property
    def _build(self) -> flows.Build:
        return partial(from_table, spec=self.spec, explain_with=self.explain)
