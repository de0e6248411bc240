"""Answers: a range of windows, the latest, those at a time, and one window in any of its revisions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from center.api.access import IN_TURN, READS_QUERY, caller
from center.api.answer_cache import Page, entity_tag
from center.api.models import Answer, AnswerList, AnswerPage, Revisions
from center.api.negotiation import matches, negotiate
from center.api.openapi import answering
from center.api.problems import HttpProblem, problem_response
from center.api.query_params import AnswerParams
from center.api.routers.queries import query_status
from center.api.services import Center, Services
from center.api.time_params import EndTime, Time, time_text
from center.api.versions import Version, clipped, version_with, versions_of
from center.results import AnswerRecord, read_cursor
from center.serving.measures import MeasureQuestions
from edgewater.answers import Phase
from edgewater.base.errors import InvalidRequest, NotFound
from edgewater.base.streams import MIN_TIME_MS
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import as_document
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.table_texts import JSON

MAX_LIMIT = 1_000  # limit: size of a page
PAGE_BYTES = 4 << 20  # limit: memory of a page
"""A page ends after this many bytes of synopses, before its `limit`. Rendered answers are about ten times larger."""
MAX_NAMED = 3
"""Number of edges that a problem names."""
CHANGING = "private, no-cache"
"""Cacheable, but revalidated each time; If-None-Match makes that cheap."""
IMMUTABLE = "private, max-age=31536000, immutable"
IMMUTABLE_SHORT = "private, max-age=60, immutable"
"""For URLs without the query's version. Another query may be registered under the name after a deletion."""

router = APIRouter(prefix="/v1/queries/{name}", tags=["answers"])


class LatestParams(AnswerParams):
    """Selects the version."""

    version: Version = None


class RangeParams(AnswerParams):
    """Selects windows by their start."""

    start: Time | None = None
    """Inclusive."""
    end: EndTime = None
    """Exclusive."""
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = 100
    """Windows at most; large answers make pages shorter."""
    cursor: Annotated[str | None, Field(max_length=18)] = None
    """`next_cursor` of the previous page."""
    version: Version = None


class AtParams(AnswerParams):
    """Selects windows by a time."""

    time: Time
    """Event time; selects all windows that contain it."""
    version: Version = None


class RevisionParams(AnswerParams):
    """Selects a window's revision."""

    revision: Annotated[int | None, Field(ge=1, le=1 << 53)] = None
    """Default: the newest. A revision never changes."""
    version: Annotated[int | None, Field(ge=1, le=1 << 31)] = None
    """Version of the query; makes a revision cacheable for good."""


@router.get("/windows", summary="A range of windows", **answering(AnswerPage, 409))
def windows(name: str, params: Annotated[RangeParams, Query()], request: Request, center: Center) -> Response:
    """The newest revision of each window that starts in [start, end), ascending, in pages.

    Every answer states its completeness. Windows without an answer are not listed. The range may span versions of the
    query: a page has the windows of one version, and ends at the border to the next version. Earlier versions that
    cannot answer the questions are omitted, such as versions without a measure.
    """
    query, records, cursor = _read_page(center, _asked(versions_of(center, name, params.version), params), params)
    questions = params.questions(query.spec)
    page = Page(time_text(params.start), time_text(params.end), params.limit, cursor)
    return respond(request, center, query, records, questions, params, page=page)


@router.get("/latest", summary="The last window", **answering(Answer, 409))
def latest(name: str, params: Annotated[LatestParams, Query()], request: Request, center: Center) -> Response:
    """The newest revision of the last window that has an answer.

    After a change it is a window of the previous version, until the new version has an answer. Without an answer, the
    problem (404) states why: `state`, `reason`, `remedy`, `since` and `waits_for`, as `/status` does.
    """
    versions = _asked(versions_of(center, name, params.version), params)
    for query in reversed(versions):
        record = center.results.latest(query.ref, params.min_phase, query.windows.until_ms)
        if record is not None:
            return respond(request, center, query, [record], params.questions(query.spec), params)
    return _no_answer(request, center, versions[-1], params.min_phase)


def _no_answer(request: Request, center: Services, query: RegisteredQuery, min_phase: Phase) -> Response:
    """Returns a 404 with the query's status: why it has no answer, which edges it waits for, and what to do."""
    status = query_status(center, caller(request), query)
    wanted = "answer" if min_phase is Phase.EARLY else f"answer of phase {min_phase.value}"
    why = status["reason"] or "its windows are still open or may change"
    detail = f"query {query.ref.name} has no {wanted} yet: {why}"
    if status["remedy"]:
        detail += f". What to do: {status['remedy']}"
    shown = ("state", "reason", "remedy", "since", "waits_for", "edges")
    members = as_document({name: member for name, member in status.items() if name in shown})
    return problem_response("not-found", detail, instance=request.url.path, extra=members)


@router.get("/at", summary="At a moment", **answering(AnswerList, 409))
def at(name: str, params: Annotated[AtParams, Query()], request: Request, center: Center) -> Response:
    """The newest revision of each window that contains an event time: several for sliding windows.

    All answers are of one version: the newest version that has such an answer. The parameter `version` chooses another
    version.
    """
    versions = versions_of(center, name, params.version)
    records: list[AnswerRecord] = []
    for query in reversed(versions):
        if query.windows.from_ms <= params.time:
            records = center.results.at(query.ref, params.time, params.min_phase)
            records = [record for record in records if record.window_start_ms in query.windows]
        if records:
            break
    questions = params.questions(query.spec)
    return respond(request, center, query, records, questions, params, as_list=True)


@router.get("/windows/{start}", summary="One window", **answering(Answer, 409))
def window(
    name: str, start: Time, params: Annotated[RevisionParams, Query()], request: Request, center: Center
) -> Response:
    """The answer to the window that starts at `start`.

    A revision never changes, so it may be cached.
    """
    query = version_with(versions_of(center, name, params.version), start)
    questions = params.questions(query.spec)
    revision = params.revision or revisions_of(center, query, start)[-1]
    record = center.results.answer(query.ref, start, revision)
    cache = CHANGING
    if params.revision is not None:
        cache = IMMUTABLE if params.version is not None else IMMUTABLE_SHORT
    if record.phase.rank < params.min_phase.rank:
        raise NotFound(f"query {name}: the answer at {rfc3339(start)} is {record.phase.value}, not {params.min_phase}")
    return respond(request, center, query, [record], questions, params, cache=cache)


@router.get("/windows/{start}/revisions", dependencies=[READS_QUERY, IN_TURN], summary="A window's revisions")
def revisions(name: str, start: Time, center: Center) -> Revisions:
    query = version_with(versions_of(center, name, None), start)
    return Revisions(query=name, window_start=rfc3339(start), revisions=revisions_of(center, query, start))


def _asked(versions: Sequence[RegisteredQuery], params: AnswerParams) -> list[RegisteredQuery]:
    """Returns the versions that can answer the questions. Raises InvalidRequest if the newest version cannot."""
    params.questions(versions[-1].spec)
    able = []
    for query in versions:
        with suppress(InvalidRequest):
            params.questions(query.spec)
            able.append(query)
    return able


def _read_page(
    center: Services, versions: Sequence[RegisteredQuery], params: RangeParams
) -> tuple[RegisteredQuery, list[AnswerRecord], str | None]:
    """Returns a page of answers of one version, and the cursor of the next page.

    The page ends after `limit` answers, with the answer that reaches PAGE_BYTES of synopses, or at a border.
    """
    after_ms = MIN_TIME_MS if params.cursor is None else read_cursor(params.cursor)
    for number, query in enumerate(versions):
        start, end = clipped(query, params.start, params.end)
        if query.windows.until_ms <= after_ms or (start is not None and start == end):
            continue
        limits = params.limit, params.cursor, params.min_phase, PAGE_BYTES
        records, cursor = center.results.windows(query.ref, start, end, *limits)
        if records:
            follows = number + 1 < len(versions) and (params.end is None or params.end > query.windows.until_ms)
            return query, records, cursor or (str(records[-1].window_start_ms) if follows else None)
    return versions[-1], [], None


def revisions_of(center: Services, query: RegisteredQuery, start_ms: int) -> list[int]:
    """Returns the revisions of a window, ascending. Raises NotFound if it has no answer."""
    revisions = center.results.revisions(query.ref, start_ms)
    if not revisions:
        raise NotFound(f"query {query.ref.name}: no window that starts at {rfc3339(start_ms)} has an answer")
    return revisions


def respond(
    request: Request,
    center: Services,
    query: RegisteredQuery,
    records: Sequence[AnswerRecord],
    questions: MeasureQuestions,
    params: AnswerParams,
    *,
    page: Page | None = None,
    as_list: bool = False,
    cache: str = CHANGING,
    made_by: str = "",
) -> Response:
    """Returns answers in the requested form, or 304 before anything is rendered. Raises HttpProblem for `require`.

    Args:
        made_by: of answers that no store has, all that they depend on besides the stored answers.
    """
    form = negotiate(request.headers.get("accept"), params.format)
    if params.require is not None:
        _require_complete(records)
    etag = entity_tag(query, records, questions, page, f"{form} {made_by}")
    headers = {"ETag": etag, "Cache-Control": cache, "Vary": "Accept"}
    if page is not None and page.next_cursor is not None:
        headers["Link"] = f'<{request.url.include_query_params(cursor=page.next_cursor)}>; rel="next"'
    if matches(request.headers.get("if-none-match"), etag):
        return Response(None, 304, headers)
    if page is None and not as_list and form == JSON:
        body = center.renderer.answer(records[0], query, questions)
    else:
        body = center.renderer.answers(records, query, questions, page, form, are_stored=not made_by)
    return Response(body, 200, headers, form)


def _require_complete(records: Sequence[AnswerRecord]) -> None:
    for record in records:
        facts = record.facts
        if facts.ratio < 1:
            edges = facts.lacking
            lacking = f" of {', '.join(edges[:MAX_NAMED])}{', …' if len(edges) > MAX_NAMED else ''}" if edges else ""
            text = f"the answer to the window at {rfc3339(record.window_start_ms)} may lack records{lacking}"
            raise HttpProblem("incomplete", ": ".join([text, *filter(None, ["; ".join(facts.reasons)])]))
