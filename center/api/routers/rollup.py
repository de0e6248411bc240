"""Roll-ups: windows merged into longer intervals, on request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from center.api.answer_cache import Page
from center.api.models import AnswerPage
from center.api.openapi import answering
from center.api.query_params import AnswerParams
from center.api.routers.answers import respond
from center.api.services import Center, Services
from center.api.time_params import EndTime, Time, time_text
from center.api.versions import clipped, only_version, versions_of
from center.results import AnswerRecord
from center.serving.rollup import EVERY_ACCEPTED, Intervals, roll_up
from edgewater.answers import Phase
from edgewater.answers.work import WorkLimits
from edgewater.base.errors import InvalidRequest
from edgewater.model.calendar_units import UTC
from edgewater.model.registered_query import RegisteredQuery

MAX_INTERVALS = 1_000  # limit: size of a reply
MAX_WINDOWS = 600_000
"""Maximum number of windows that one request merges: a year of minutes."""
MAX_BYTES = 4 << 30
"""Maximum bytes of the synopses that one request reads."""
LIMITS = WorkLimits(cpu_s=120, cells=100_000_000, nbytes=2 * MAX_BYTES, less="fewer windows: a shorter range")
"""A year of minutes takes more CPU than other requests may take. A page ends before it reaches `nbytes`."""
CHUNK = 1_000  # limit: memory of a roll-up
CHUNK_BYTES = 16 << 20  # limit: memory of a roll-up

router = APIRouter(prefix="/v1/queries/{name}", tags=["answers"])


class RollupParams(AnswerParams):
    """Selects intervals by their start."""

    every: Annotated[str, Field(max_length=32, description=f"Length of the intervals: {EVERY_ACCEPTED}.")]
    zone: Annotated[str, Field(max_length=64)] = UTC
    """Time zone of days and longer units, such as Europe/Berlin."""
    start: Time | None = None
    """Inclusive; the interval that contains it is the first one."""
    end: EndTime = None
    """Exclusive; of the start of intervals."""
    limit: Annotated[int, Field(ge=1, le=MAX_INTERVALS)] = 100
    """Intervals at most."""
    cursor: int | None = None
    """`next_cursor` of the previous page."""


@router.get("/rollup", summary="Windows merged into longer intervals", **answering(AnswerPage, 409))
async def rollup(name: str, params: Annotated[RollupParams, Query()], request: Request, center: Center) -> Response:
    """The newest answers of the windows of each interval, merged, ascending, in pages.

    Works for tumbling windows, and for sliding windows that fill an interval without overlaps. Each answer states in
    `quality.completeness` how many `windows` its interval has, and how many of them are `unanswered`. With an
    unanswered window a sum has no bounds. A window that all edges have closed without a record is not unanswered. The
    contract is met if each window has met its contract. Intervals without an answer are not listed.
    """
    return await center.costly.run(request, partial(_rolled_up, name, params, request, center), LIMITS)


def _rolled_up(name: str, params: RollupParams, request: Request, center: Services) -> Response:
    versions = versions_of(center, name, None)
    query, _, _ = only_version(versions, params.start if params.cursor is None else params.cursor, params.end)
    questions = params.questions(query.spec)
    intervals = Intervals(query.spec.window, params.every, params.zone)
    start = params.start if params.cursor is None else params.cursor
    start = None if start is None else intervals.at(start).start_ms
    end = None if params.end is None else intervals.at(params.end - 1).end_ms
    start, end = clipped(query, start, end)
    records = _bounded(center, query, params.min_phase, start, end)
    empty = partial(center.results.empty_windows, query.ref)
    answers, cursor = _page(roll_up(records, query.spec, intervals, empty), intervals, params)
    page = Page(time_text(params.start), time_text(params.end), params.limit, cursor)
    ratios = [answer.facts.ratio for answer in answers]  # which also depend on windows without an answer
    made_by = f"{params.every} {params.zone} {ratios}"
    return respond(request, center, query, answers, questions, params, page=page, made_by=made_by)


class _PageFull(Exception):
    """A page has reached the number or the size of windows that one request may merge.

    Attributes:
        start_ms: start of the first window that was not merged.
    """

    def __init__(self, start_ms: int) -> None:
        self.start_ms = start_ms
        super().__init__()


def _page(
    answers: Iterator[AnswerRecord], intervals: Intervals, params: RollupParams
) -> tuple[list[AnswerRecord], str | None]:
    """Returns a page of answers, and the cursor of the next page.

    Raises:
        InvalidRequest: one interval has more windows than a request may merge.
    """
    page: list[AnswerRecord] = []
    try:
        for answer in answers:
            if len(page) == params.limit:
                return page, str(answer.window_start_ms)
            page.append(answer)
    except _PageFull as full:
        if not page:
            accepted = f"intervals of at most {MAX_WINDOWS} windows and {MAX_BYTES >> 20} MiB of synopses"
            raise InvalidRequest("every", params.every, accepted) from None
        return page, str(intervals.at(full.start_ms).start_ms)
    return page, None


def _bounded(
    center: Services, query: RegisteredQuery, min_phase: Phase, start: int | None, end: int | None
) -> Iterator[AnswerRecord]:
    """Yields the newest answers of a range. Raises _PageFull."""
    cursor, windows, nbytes = None, 0, 0
    while True:
        chunk, cursor = center.results.windows(query.ref, start, end, CHUNK, cursor, min_phase, CHUNK_BYTES)
        for record in chunk:
            windows, nbytes = windows + 1, nbytes + len(record.synopsis or b"")
            if windows > MAX_WINDOWS or nbytes > MAX_BYTES:
                raise _PageFull(record.window_start_ms)
            yield record
        if cursor is None:
            return
