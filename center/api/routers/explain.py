"""Why an answer is what it is: one value's error by cause, completeness by window and edge, and the error budget."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field, JsonValue

from center.api.access import IN_TURN, READS_QUERY
from center.api.edge_progress import edge_state, watermark
from center.api.measure_models import ApiModel, Params, Rfc3339
from center.api.query_params import QuestionParams
from center.api.routers.answers import revisions_of
from center.api.services import Center, Services
from center.api.time_params import EndTime, Time, border
from center.api.versions import Version, clipped, version_with, versions_of
from center.budgets import BudgetAllocator, Holding, error_limits
from center.results import AnswerRecord, as_far_as_readable
from center.serving.explanation import NOTHING_STATED, edge_statements, explain_value, value_of_group
from edgewater.answers import Cause
from edgewater.base.errors import InvalidRequest
from edgewater.base.streams import MAX_TIME_MS, EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.computed import ComputedValue
from edgewater.model.edge_records import expected_edges
from edgewater.model.json_types import as_document
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.replies import ExplainedEdge, ExplainedRevision, Explanation, Sides

MAX_REVISIONS = 20
"""Maximum number of revisions of a window that an explanation evaluates."""
MAX_WINDOWS = 1_000  # limit: size of a reply

router = APIRouter(prefix="/v1/queries/{name}", tags=["answers"])


class ExplainParams(QuestionParams):
    """Selects a value of a window: a measure, a group, and the questions about the measure."""

    revision: Annotated[int | None, Field(ge=1, le=1 << 53)] = None
    """Default: the newest."""


class MatrixParams(Params):
    start: Time | None = None
    """Inclusive."""
    end: EndTime = None
    """Exclusive."""
    limit: Annotated[int, Field(ge=1, le=MAX_WINDOWS)] = 120
    """The last windows of the range, at most."""
    version: Version = None


@router.get("/windows/{start}/explain", dependencies=[READS_QUERY, IN_TURN], summary="Why a value is what it is")
async def explain(
    name: str, start: Time, params: Annotated[ExplainParams, Query()], request: Request, center: Center
) -> Explanation:
    """Returns the error by cause, the statements of each edge, and the value's revisions.

    Default: the first measure, and of several groups the group with the widest interval.
    """
    return await center.costly.run(request, partial(_explained, name, start, params, center))


def _explained(name: str, start: Time, params: ExplainParams, center: Services) -> Explanation:
    query = version_with(versions_of(center, name, None), start)
    measure = _measure(params, query.spec)
    questions = params.questions(query.spec)
    revisions = revisions_of(center, query, start)
    record = center.results.answer(query.ref, start, params.revision or revisions[-1])
    value = explain_value(record, query.spec, measure, questions)
    history = list[ExplainedRevision]()
    for revision in revisions[-MAX_REVISIONS:]:
        other = center.results.answer(query.ref, start, revision)
        cell = as_far_as_readable(lambda r: value_of_group(r, query.spec, measure, questions, value["group"]), other)
        given_at = rfc3339(other.answered_at_ms)
        history.append({"revision": revision, "phase": other.phase.value, "given_at": given_at, **cell})
    return {
        "query": name,
        "window": {"start": rfc3339(record.window_start_ms), "end": rfc3339(record.window_end_ms)},
        "phase": record.phase.value,
        "revision": record.revision,
        "given_at": rfc3339(record.answered_at_ms),
        "measure": measure.name,
        **value,
        "edges": _edges(center, query, record, measure),
        "revisions": history,
    }


def _measure(params: ExplainParams, spec: QuerySpec) -> Measure | ComputedValue:
    name = params.measure[0] if params.measure else spec.shown[0]
    if len(params.measure) > 1 or name not in spec.shown:
        raise InvalidRequest("measure", params.measure, f"one of {', '.join(spec.shown)}")
    return next(each for each in spec.values if each.name == name)


def _edges(
    center: Services, query: RegisteredQuery, record: AnswerRecord, measure: Measure | ComputedValue
) -> list[ExplainedEdge]:
    stated = edge_statements(record, measure)
    known = {e.edge: e for e in center.catalog.edges.all()}
    plans = center.catalog.budgets.sampling().get(query.ref, {})
    until = record.facts.edges.closed_until_ms or {}
    now_ms, shown = center.now_ms(), list[ExplainedEdge]()
    for edge in sorted({*stated, *expected_edges(query.spec, known.values())}):
        found, statement = known.get(EdgeId(edge)), stated.get(edge, NOTHING_STATED)
        # The answer may contain frames that are newer than the last heartbeat.
        closed_ms = record.window_end_ms if statement["closed"] else until.get(edge)
        heard_ms = found.watermarks.get(query.spec.stream) if found else None
        shown.append({
            "edge": edge,
            "state": edge_state(found, now_ms) if found else "never_connected",
            **watermark(max((t for t in (closed_ms, heard_ms) if t is not None), default=None)),
            **statement,
            "rate": plans[EdgeId(edge)].rate if edge in plans else None,
        })  # fmt: skip
    return shown


class CompletenessMatrix(ApiModel):
    """A character per window, of each edge and of the phases."""

    query: str
    windows: list[Rfc3339]
    """Starts, ascending."""
    edges: dict[str, str] = Field(examples=[{"jfk": "cccm"}])
    """`c`: closed with all its records; `m`: missing; `i`: input may be lost; `s`: state lost; `l`: left; `-`: was not
    expected; `?`: unknown."""
    phases: str = Field(examples=["ffce"])
    """`e`: early, `c`: complete, `f`: final."""
    ratios: list[float]
    earlier: bool
    """The range has earlier windows, beyond `limit`."""


@router.get("/completeness", dependencies=[READS_QUERY, IN_TURN], summary="Which edges each window has")
def completeness(name: str, params: Annotated[MatrixParams, Query()], center: Center) -> CompletenessMatrix:
    """Returns the newest answer of each window, by edge. Windows without an answer are not listed."""
    versions = versions_of(center, name, params.version)
    query, records, earlier = versions[-1], list[AnswerRecord](), False
    for version in reversed(versions):
        start, end = clipped(version, params.start, params.end)
        # One more than is shown, so that the range of a full page is known to have earlier windows.
        missing = params.limit + 1 - len(records)
        if missing > 0 and (start is None or start != end):
            records = center.results.last_windows(version.ref, start, end, missing)[0] + records
    records, earlier = records[-params.limit :], len(records) > params.limit
    listed = [_closed_by(r) for r in records]
    named = {e for r, closed in zip(records, listed, strict=True) for e in (*(closed or ()), *r.facts.lacking)}
    edges = sorted({*named, *expected_edges(query.spec, center.catalog.edges.all())})
    return CompletenessMatrix(
        query=name,
        windows=[rfc3339(r.window_start_ms) for r in records],
        edges={e: "".join(_state(r, c, e) for r, c in zip(records, listed, strict=True)) for e in edges},
        phases="".join(r.phase.value[0] for r in records),
        ratios=[r.facts.ratio for r in records],
        earlier=earlier,
    )


def _closed_by(record: AnswerRecord) -> frozenset[str] | None:
    """Returns the edges that had closed the window; None: unknown."""
    closed = record.facts.edges.closed
    return None if closed is None else frozenset(closed)


def _state(record: AnswerRecord, closed: frozenset[str] | None, edge: str) -> str:
    facts = record.facts
    causes = {d.cause for d in facts.deviations if d.edge == edge}
    for cause, state in ((Cause.LEFT, "l"), (Cause.LOST_STATE, "s"), (Cause.INPUT_LOST, "i"), (Cause.MISSING, "m")):
        if cause in causes:
            return state
    if closed is None:
        return "?"
    return "c" if edge in closed else "-"


class PendingGrant(ApiModel):
    shares: dict[str, float]
    from_: Rfc3339 | None = Field(alias="from")
    """First slice to which it applies. Null: all slices."""


class EdgeBudget(ApiModel):
    """An edge's part of a query's error budget, per measure."""

    edge: str
    granted: dict[str, float] | None = None
    """The last granted share. Null: none yet."""
    in_force: dict[str, float] | None = None
    """The most that it may withhold of a new slice, without what is pending. Null: unknown."""
    pending: PendingGrant | None = None
    """A granted, unconfirmed share. It counts in addition."""
    from_: Rfc3339 | None = Field(default=None, alias="from")
    """First slice of `in_force`. Null: all slices."""
    heard_at: Rfc3339 | None = None
    """Of its last report."""
    withheld_last: dict[str, Sides] | None
    """What it withholds of the last window that has an answer. Null: unknown."""
    rate: float | None
    """As in an explanation."""
    wire_bytes: int
    """Applied so far."""


class QueryBudget(ApiModel):
    """A query's error budget and how it is divided."""

    query: str
    budget: JsonValue
    """As registered."""
    limits: dict[str, float]
    """Per measure; in its unit."""
    divided: list[str]
    """Measures whose limit the edges share; each may use the others in full."""
    sums: dict[str, float]
    """Per divided measure, the most that all edges together may withhold of a new slice; never more than the limit."""
    window: Rfc3339 | None
    """The window of `withheld_last`."""
    edges: list[EdgeBudget]


@router.get("/budget", dependencies=[READS_QUERY, IN_TURN], summary="How the error budget is divided")
def budget(name: str, center: Center) -> QueryBudget:
    """Returns, per edge, the share that was granted, the share in force, the pending share, and the withheld values."""
    query = center.catalog.queries.get(name)
    divided, whole = error_limits(query.spec)
    state = center.catalog.budgets.state(query.ref)
    allocator = BudgetAllocator(divided, whole)
    if state is not None:
        allocator.restore(state)
    known = {e.edge: e for e in center.catalog.edges.all()}
    shipped, plans = center.results.shipped(query.ref), center.catalog.budgets.sampling().get(query.ref, {})
    latest = next(iter(center.results.last_windows(query.ref, None, None, 1)[0]), None)
    stated = {m.name: edge_statements(latest, m) for m in query.spec.measures} if latest else {}
    edges = sorted({*expected_edges(query.spec, known.values()), *allocator.holdings, *map(EdgeId, shipped)})
    return QueryBudget(
        query=name,
        budget=as_document(query.spec.to_mapping(seed=False)).get("budget"),
        limits={**divided, **whole},
        divided=list(divided),
        sums=allocator.in_force(MAX_TIME_MS - 1) if state is not None else {},
        window=rfc3339(latest.window_start_ms) if latest else None,
        edges=[
            _edge_budget(
                edge,
                allocator.holdings.get(edge),
                {name: by_edge[edge]["withheld"] for name, by_edge in stated.items() if edge in by_edge},
                plans[edge].rate if edge in plans else None,
                shipped[edge]["wire_bytes"] if edge in shipped else 0,
            )
            for edge in edges
        ],
    )


def _edge_budget(
    edge: EdgeId, holding: Holding | None, withheld: Mapping[str, Sides | None], rate: float | None, wire_bytes: int
) -> EdgeBudget:
    known = {name: bound for name, bound in withheld.items() if bound is not None} or None
    pending = None if holding is None else holding.pending
    stated = {} if holding is None else {
        "granted": dict(holding.grant.shares) if holding.grant.version else None,
        "in_force": dict(holding.last.shares),
        "pending": pending and {"shares": dict(pending.shares), "from": border(pending.from_ms)},
        "from": border(holding.last.from_ms),
        "heard_at": border(holding.reported_at_ms) if holding.reported_at_ms else None,
    }  # fmt: skip
    rest = {"edge": edge, "withheld_last": known, "rate": rate, "wire_bytes": wire_bytes}
    return EdgeBudget.model_validate({**stated, **rest})
