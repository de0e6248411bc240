"""Answers as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, ConfigDict
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from center.api.access import READS, READS_QUERY, Caller, require_still
from center.api.limits import InSlot
from center.api.live_feed import LiveStream
from center.api.openapi import Responses, problems
from center.api.query_params import QuestionParams
from center.api.services import Center, Services
from edgewater.errors import EdgewaterError, InvalidRequest

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
    str | None,
    Header(description="Id of the last `answer` event that the client has; the stream continues after it."),
]

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1", tags=["live"])


class NoParams(BaseModel):
    model_config = ConfigDict(extra="forbid")


@router.get("/live", dependencies=[READS], response_model=None, responses=RESPONSES, summary="All queries, live")
async def live(
    params: Annotated[NoParams, Query()],
    request: Request,
    center: Center,
    caller: Caller,
    last_event_id: LastEventId = None,
) -> Response:
    """Begins with the latest answer of each query that the caller may read. For the events, see the stream of one."""
    after, allowed = _answer_id(last_event_id), partial(require_still, request)
    return _stream(center, LiveStream(center.feed, reader=caller, after=after, require_allowed=allowed))


@router.get(
    "/queries/{name}/live",
    dependencies=[READS_QUERY],
    response_model=None,
    responses=RESPONSES | problems(404, 422, 429, 503),
    summary="One query, live",
)
async def live_query(
    name: str,
    params: Annotated[QuestionParams, Query()],
    request: Request,
    center: Center,
    caller: Caller,
    last_event_id: LastEventId = None,
) -> Response:
    """`answer`: an answer, with its answer id as the event id; the latest one comes first.

    `progress`: every few seconds, also without data: the edges' states and watermarks.
    `gap`: answers were skipped because the client was too far behind; the newest follow.
    A slow client gets the newest revision of each window only.
    The stream ends when the query is deleted.
    """
    query = await run_in_threadpool(center.catalog.query, name)
    questions = await run_in_threadpool(params.questions, query.spec)
    after, allowed = _answer_id(last_event_id), partial(require_still, request)
    return _stream(center, LiveStream(center.feed, query, questions, caller, after, allowed))


def _answer_id(text: str | None) -> int | None:
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequest("Last-Event-ID", text, "the id of an `answer` event")
    return int(text)


def _stream(center: Services, stream: LiveStream) -> Response:
    async def counted() -> AsyncIterator[bytes]:
        with center.metrics.live_clients.track_inprogress():
            try:
                async for events in stream.events():
                    if events:
                        yield events
            except EdgewaterError as exc:
                # The response has started, so no status can report the error; the client reconnects and continues.
                log.warning("a live stream was closed: %s", exc)

    # `progress` events keep the connection alive, so no pings are needed.
    return InSlot(EventSourceResponse(counted(), ping=0), center.live_slots, stream.reader)
