"""The methods of `Center` and `Query` as coroutines (`AsyncCenter` and `AsyncQuery`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from edgewater.client import requests as flows
from edgewater.client.answers import Answer, Answers, Gap, Progress, from_table
from edgewater.client.center import QueryData
from edgewater.client.connection import Connection, LiveState, bounded_async, built, event_source, unreachable
from edgewater.client.requests import IfExists, Moment, Questions, moment, question_params, segment
from edgewater.model import replies
from edgewater.model.json_types import Document, Groups

T = TypeVar("T")


class AsyncCenter:
    """A connection to a center, for asyncio. Close it, or use it as an asynchronous context manager.

    Its arguments, methods and errors are the same as in `Center`.
    """

    def __init__(
        self, url: str | None = None, *, token: str | None = None, ca: str | Path | None = None, timeout: float = 30.0
    ) -> None:
        self._http = Connection(url, token, ca, timeout).open(httpx.AsyncClient, bounded_async)

    @property
    def url(self) -> str:
        return str(self._http.base_url)

    async def register(
        self, spec: Document | str | Path, if_exists: IfExists = "same", *, lasts: str | None = None
    ) -> AsyncQuery:
        return AsyncQuery(await self._run(flows.register(spec, if_exists, lasts)), self)

    async def put(
        self, spec: Document | str | Path, *, at: Moment | None = None, version: int | None = None,
        lasts: str | None = None,
    ) -> AsyncQuery:  # fmt: skip
        return AsyncQuery(await self._run(flows.put(spec, at, version, lasts)), self)

    async def dry_run(
        self, spec: Document | str | Path, *, change: bool = False, at: Moment | None = None,
        version: int | None = None, lasts: str | None = None,
    ) -> replies.DryRun:  # fmt: skip
        return await self._run(flows.dry_run(spec, change, at, version, lasts))

    async def query(self, name: str) -> AsyncQuery:
        return AsyncQuery(await self._run(flows.get(f"/v1/queries/{segment(name)}")), self)

    async def queries(self) -> list[AsyncQuery]:
        return [AsyncQuery(q, self) for q in (await self._run(flows.get("/v1/queries")))["queries"]]

    async def live(
        self, *names: str, after: int | None = None, changes: bool = False, summary: bool = False
    ) -> AsyncIterator[Answer | Progress | Gap]:
        queries = [await self.query(name) for name in names] if names else await self.queries()
        async for event in self._live(LiveState.of_several(queries, after, changes, summary)):
            yield event

    async def edges(self) -> list[replies.Edge]:
        return (await self._run(flows.reply("/v1/edges", replies.EdgeList)))["edges"]

    async def streams(self) -> list[replies.StreamColumns]:
        return (await self._run(flows.reply("/v1/streams", replies.StreamList)))["streams"]

    async def get(self, path: str, **params: str) -> Any:
        return await self._run(flows.get(path, tuple(params.items())))

    async def send(self, method: str, path: str, body: bytes | None = None, media: str = "application/json") -> Any:
        return await self._run(flows.send(method, path, body, media))

    async def sql(self, statement: str) -> Any:
        return await self._run(flows.sql(statement))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncCenter({self.url!r})"

    async def _run(self, flow: flows.Flow[T]) -> T:
        with closing(flow):
            try:
                request = next(flow)
                while True:
                    try:
                        reply = await self._perform(request)
                    except Exception as exc:
                        request = flow.throw(exc)
                    else:
                        request = flow.send(reply)
            except StopIteration as done:
                value: T = done.value
                return value

    async def _perform(self, request: flows.Request | flows.Pause) -> Any:
        if isinstance(request, flows.Pause):
            return await asyncio.sleep(request.seconds)
        try:
            return flows.checked(await self._http.send(built(self._http, request)), request.missing)
        except httpx.TransportError as exc:
            raise unreachable(self._http, exc) from exc

    async def _live(self, state: LiveState) -> AsyncIterator[Answer | Progress | Gap]:
        while True:
            failure: Exception | None = None
            try:
                async with aclosing(await self._http.send(state.request(self._http), stream=True)) as response:
                    if not response.is_success:
                        await response.aread()
                    async for sse in event_source(response).aiter_sse():
                        if (event := state.event(sse)) is not None:
                            yield event
            except (httpx.TransportError, flows.RequestRefused, flows.Unreachable) as exc:
                failure = exc
            await asyncio.sleep(state.pause(failure).seconds)


@dataclass(frozen=True, slots=True, repr=False)
class AsyncQuery(QueryData):
    """A registered query at a center, for asyncio. Its methods are the same as in `Query`."""

    center: AsyncCenter

    async def latest(self, group: Groups | None = None, **questions: Unpack[Questions]) -> Answer:
        return await self._run(flows.latest(self.name, question_params(group, questions), self._build))

    async def windows(
        self, start: Moment | None = None, end: Moment | None = None, group: Groups | None = None, *,
        every: str | None = None, zone: str | None = None, **questions: Unpack[Questions],
    ) -> Answers:  # fmt: skip
        bounds, params = (
            (moment(start, "start"), moment(end, "end")),
            question_params(group, questions),
        )
        return await self._run(
            flows.windows(self.name, *bounds, time.monotonic, params, self._build, every=every, zone=zone)
        )

    async def window(
        self,
        start: Moment,
        revision: int | None = None,
        group: Groups | None = None,
        **questions: Unpack[Questions],
    ) -> Answer:
        at = moment(start, "start") or ""
        return await self._run(flows.window(self.name, at, revision, question_params(group, questions), self._build))

    async def wait(
        self, window: Moment, phase: flows.Phase = "final", timeout: float = 60.0, group: Groups | None = None,
        **questions: Unpack[Questions],
    ) -> Answer:  # fmt: skip
        at, params = moment(window, "window") or "", question_params(group, questions)
        return await self._run(flows.wait(self.name, at, phase, timeout, time.monotonic, params, self._build))

    def live(
        self, group: Groups | None = None, after: int | None = None, *, changes: bool = False,
        summary: bool = False, **questions: Unpack[Questions],
    ) -> AsyncIterator[Answer | Progress | Gap]:  # fmt: skip
        return self.center._live(LiveState.of(self, question_params(group, questions), after, changes, summary))

    async def status(self) -> replies.QueryStatus:
        return await self._run(flows.reply(f"/v1/queries/{segment(self.name)}/status", replies.QueryStatus))

    async def detail(self) -> replies.QueryDetail:
        return await self._run(flows.reply(f"/v1/queries/{segment(self.name)}", replies.QueryDetail))

    async def explain(
        self,
        window: Moment,
        group: Groups | None = None,
        revision: int | None = None,
        **questions: Unpack[Questions],
    ) -> replies.Explanation:
        at = moment(window, "window") or ""
        return await self._run(flows.explain(self.name, at, revision, question_params(group, questions)))

    async def delete(self) -> None:
        await self.center.send("DELETE", f"/v1/queries/{segment(self.name)}")

    async def _run(self, flow: flows.Flow[T]) -> T:
        return await self.center._run(flow)

    @property
    def _build(self) -> flows.Build:
        return partial(from_table, spec=self.spec, explain_with=self.explain)
