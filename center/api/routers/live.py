"""Answers as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from pydantic import Field
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from center.api.access import READS, READS_QUERY, Caller, require_still
from center.api.limits import InSlot
from center.api.live_feed import LiveStream
from center.api.measure_models import Params
from center.api.openapi import Responses, problems
from center.api.query_params import QuestionParams
from center.api.services import Center, Services
from edgewater.answers import Phase
from edgewater.base.errors import EdgewaterError, InvalidRequest, NotFound, StorageError
from edgewater.model.registered_query import RegisteredQuery

EXAMPLE = """\
id: 41
event: answer
data: {"query":"flights_by_carrier","window":{…},"phase":"early","revision":1,"data":[…],"quality":{…},…}

event: progress
data: {"time":"…","queries":[{"query":"flights_by_carrier","edges":[{"edge":"jfk","state":"up","watermark":"…",…}],…}]}

event: gap
data: {"after":12,"through":5041,"reason":"more than 1000 answers behind"}
"""
RESPONSES: Responses = {
    200: {
        "description": "Events `answer`, `progress` and `gap`.",
        "content": {"text/event-stream": {"example": EXAMPLE}},
    }
}
LastEventId = Annotated[
    str | None, Header(description="Id of the last `answer` event that the client has; the stream continues after it.")
]

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1", tags=["live"])


MAX_QUERIES = 500
"""Maximum number of names of a stream of several queries."""


class _StreamParams(Params):
    """What a stream sends of each answer."""

    summary: bool = False
    """`data` has only the 5 groups with the widest intervals, and of equal ones the largest values; `groups` counts
    all."""
    changes: bool = False
    """An answer to a window that the client has in an earlier revision has only the groups that differ: `base` is that
    revision, `removed` lists the groups that are gone, and `groups` counts all. An answer without `base` is whole."""
    min_phase: Phase = Phase.EARLY
    """Only answers that have reached this phase."""


class SeveralParams(_StreamParams):
    """Selects the queries of a stream of several."""

    query: Annotated[list[str], Field(max_length=MAX_QUERIES)] = []
    """Only these; default: all that the caller may read."""


class LiveParams(_StreamParams, QuestionParams):
    """The questions of a stream of one query."""


@router.get(
    "/live",
    dependencies=[READS],
    response_model=None,
    responses=RESPONSES | problems(404, 429, 503),
    summary="Several queries, live",
)
async def live(
    params: Annotated[SeveralParams, Query()],
    request: Request,
    center: Center,
    caller: Caller,
    last_event_id: LastEventId = None,
) -> Response:
    """A stream of several queries.

    The stream begins with the latest answer of each query. It has the same events as `/v1/queries/{name}/live`.

    A deleted query leaves the stream. A new query with a name of the stream joins it.
    """
    names = tuple(dict.fromkeys(params.query))
    if names:
        known = {q.ref.name for q in (await run_in_threadpool(center.progress.view, refresh=True)).queries}
        for name in names:
            if name not in known or not caller.may("reader", name):
                raise NotFound(f"query {name} is not registered")
    return _stream(request, center, params, LiveStream(center.feed, reader=caller, names=names), last_event_id)


@router.get(
    "/queries/{name}/live",
    dependencies=[READS_QUERY],
    response_model=None,
    responses=RESPONSES | problems(404, 429, 503),
    summary="One query, live",
)
async def live_query(
    name: str,
    params: Annotated[LiveParams, Query()],
    request: Request,
    center: Center,
    caller: Caller,
    last_event_id: LastEventId = None,
) -> Response:
    """A stream of one query.

    `answer`: an answer, with its answer id as the event id; the latest answer comes first. `progress`: every few
    seconds, also without data: the edges' states and watermarks. `gap`: answers were skipped because the client was too
    far behind; the newest follow. A slow client gets only the newest revision of each window. `skipped` is then the
    number of earlier revisions that it did not get. After a change of the query, the stream continues with the new
    version from its first answer. The stream ends when the query is deleted.
    """
    query = await run_in_threadpool(_answered_version, center, name, params.min_phase)
    questions = await run_in_threadpool(params.questions, query.spec)
    return _stream(request, center, params, LiveStream(center.feed, query, questions, caller), last_event_id)


def _answered_version(center: Services, name: str, min_phase: Phase) -> RegisteredQuery:
    """Returns the newest version of a query that has an answer; without any answer, the newest version."""
    versions = center.catalog.queries.versions(name)
    results = center.results
    answered = (q for q in reversed(versions) if results.latest(q.ref, min_phase, q.windows.until_ms) is not None)
    return next(answered, versions[-1])


def _answer_id(text: str | None) -> int | None:
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequest("Last-Event-ID", text, "the id of an `answer` event")
    return int(text)


def _stream(
    request: Request, center: Services, params: _StreamParams, stream: LiveStream, last_event_id: str | None
) -> Response:
    """Returns a response with the events of a stream, as the parameters and the header select them."""
    if params.summary and params.changes:
        accepted = "false with summary=true: a summary has few groups"
        raise InvalidRequest("changes", True, accepted, "summary is true")
    stream.after, stream.require_allowed = _answer_id(last_event_id), partial(require_still, request)
    stream.summary, stream.changes, stream.min_phase = params.summary, params.changes, params.min_phase

    async def counted() -> AsyncIterator[bytes]:
        with center.metrics.live_clients.track_inprogress():
            try:
                async for events in stream.events():
                    if events:
                        yield events
            except EdgewaterError as exc:
                # The response has started, so no status can report the error. The client reconnects and continues.
                text = f"a live stream was closed: {exc}"
                if isinstance(exc, StorageError):
                    center.outage.note(text)
                else:
                    log.warning("%s", text)

    # `progress` events keep the connection alive, so no pings are needed.
    return InSlot(EventSourceResponse(counted(), ping=0), center.live_slots, stream.reader)
