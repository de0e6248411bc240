"""Queries: registration, list, details, deletion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Literal, cast

from anyio import from_thread
from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from center.api import models
from center.api.access import EDITS, EDITS_QUERY, IN_TURN, READS, READS_QUERY, Caller, caller, require, require_inputs
from center.api.bodies import read_document, read_typed_body
from center.api.edge_progress import edge_progress
from center.api.link_forecasts import link_forecast
from center.api.measure_models import Params
from center.api.models import EXAMPLE_SPEC, EXAMPLE_SPEC_YAML
from center.api.negotiation import SQL
from center.api.openapi import OpenApi, problems
from center.api.services import Center, Services
from center.api.time_params import Time, border
from center.api.versions import versions_of
from center.api.waiting import explain
from center.api_access import Principal
from center.catalog import COMPONENTS, Change, component_status
from center.serving.answer_tables import empty_table
from edgewater.base.errors import InvalidQuery, InvalidRequest, NotFound, did_you_mean
from edgewater.base.quantities import duration_ms
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.edge_records import EdgeRecord, expected_edges
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.replies import DryRun, DryRunEdge, QueryDetail, QueryList, QueryStatus, Registered, Spec
from edgewater.model.sql import to_sql
from edgewater.model.table_texts import columns_of
from edgewater.synopses import require_fit

router = APIRouter(prefix="/v1/queries", tags=["queries"])


@router.get(
    "", dependencies=[READS, IN_TURN], summary="The queries that the caller may read, each in its newest version"
)
def queries(center: Center, caller: Caller) -> QueryList:
    queries = center.catalog.queries.newest()
    return {"queries": [models.registered(q) for q in queries if caller.may("reader", q.ref.name)]}


class RegisterParams(Params):
    dry_run: bool = False
    """Check only."""
    lasts: Annotated[str | None, Field(alias="for", examples=["1h"])] = None
    """The query ends by itself after so much event time: it has the windows that start before. Its answers stay. As
    `until` in the query, which takes precedence."""

    @property
    def lasts_ms(self) -> int | None:
        return None if self.lasts is None else duration_ms(self.lasts, "for", InvalidRequest, minimum_ms=1)


class ChangeParams(RegisterParams):
    at: Time | None = None
    """The border: windows that start before it belong to the version before, later ones to the new version. The border
    is a start of a window, so the next one is taken. Default: a start that is late enough for all edges to hear of it
    in time."""


_BODY: OpenApi = {
    "requestBody": {
        "required": True,
        "description": "A query, as JSON or as YAML.",
        "content": {
            "application/json": {"schema": {"type": "object"}, "example": EXAMPLE_SPEC},
            "application/yaml": {"schema": {"type": "string"}, "example": EXAMPLE_SPEC_YAML},
        },
    }
}


@router.post(
    "",
    dependencies=[EDITS],
    status_code=201,
    summary="Register a query",
    response_model=Registered,
    openapi_extra=_BODY,
    responses={
        200: {
            "model": Registered | DryRun,
            "description": "The same query is registered already; or what `dry_run` finds.",
        },
        **problems(409),
    },
)
async def register(params: Annotated[RegisterParams, Query()], request: Request, center: Center) -> Response:
    """Registers a query. Edges receive it within a second. Registering the same query again changes nothing.

    The seed of its synopses is drawn, unless the query states one.

    `dry_run` returns what would happen (`DryRun`), and registers nothing.

    An invalid query is refused with the field, its value and the accepted values.
    """
    body, content_type = await read_typed_body(request, center.limits.body_ms / 1000)
    # Not on the event loop, and one query at a time: parsing takes up to a second of pure Python.
    spec = await run_sync(read_query, body, content_type, limiter=center.parsing)
    request.state.target = f"/v1/queries/{spec.name}"
    return await register_query(request, center, spec, dry_run=params.dry_run, lasts_ms=params.lasts_ms)


IfMatch = Annotated[
    str | None,
    Header(description='The `ETag` of the version that is changed, such as `"3"`. Without it, any version is changed.'),
]


@router.put(
    "/{name}",
    dependencies=[EDITS_QUERY],
    summary="Change a query",
    response_model=Registered,
    openapi_extra=_BODY,
    responses={
        200: {
            "model": Registered | DryRun,
            "description": "The query is equal to the newest version; or what `dry_run` finds.",
        },
        201: {"model": Registered, "description": "The new version, or the first one."},
        **problems(409, 412),
    },
)
async def change(
    name: str, params: Annotated[ChangeParams, Query()], request: Request, center: Center, if_match: IfMatch = None
) -> Response:
    """Makes version n+1 of a query. Windows that start before the border belong to version n, later ones to n+1.

    No answer is deleted. Version n ends by itself when its last window is final. A query that is equal to the newest
    version changes nothing. A name without a query gets its first version.

    If an edge receives the change after the border, it states the missing records or, with `since`, reads its records
    again.
    """
    body, content_type = await read_typed_body(request, center.limits.body_ms / 1000)
    spec = await run_sync(read_query, body, content_type, name, limiter=center.parsing)
    asked = Change(params.at, _expected_version(if_match))
    return await register_query(request, center, spec, dry_run=params.dry_run, lasts_ms=params.lasts_ms, change=asked)


def _expected_version(if_match: str | None) -> int | None:
    if if_match is None:
        return None
    version = if_match.strip().removeprefix("W/").strip('"')
    if not (version.isascii() and version.isdigit() and len(version) <= 18):
        raise InvalidRequest("If-Match", if_match, 'the ETag of GET /v1/queries/{name}, such as "3"')
    return int(version)


async def register_query(
    request: Request,
    center: Services,
    spec: QuerySpec,
    *,
    dry_run: bool = False,
    lasts_ms: int | None = None,
    change: Change | None = None,
) -> Response:
    """Registers a query for the caller, or returns what a registration would do.

    Args:
        lasts_ms, change: as in `Catalog.queries.register`.

    Raises:
        HttpProblem: the caller may not register it.
        Conflict, InvalidQuery, InvalidRequest: as `Catalog.queries.register`.
    """
    require(request, "editor", spec.name)
    require_inputs(request, spec)
    for lookup in spec.lookups:
        require(request, "reader", lookup.table, "table")
    if dry_run:
        outcome = await run_sync(_dry_run, center, spec, lasts_ms, change, limiter=center.registering)
        return JSONResponse(outcome)
    return await run_sync(_register, center, spec, lasts_ms, change, caller(request), limiter=center.registering)


def answered_ms(center: Services, name: str) -> int:
    """Returns the start of the last window of a query's newest version that has an answer."""
    try:
        latest = center.results.latest(center.catalog.queries.get(name).ref)
    except NotFound:
        return MIN_TIME_MS
    return MIN_TIME_MS if latest is None else latest.window_start_ms


def _dry_run(center: Services, spec: QuerySpec, lasts_ms: int | None, change: Change | None) -> DryRun:
    """Returns what a registration would do. Raises the exceptions that the registration would raise."""
    spec = center.catalog.tables.resolved(spec)
    if change is not None:
        change = replace(change, answered_ms=answered_ms(center, spec.name))
    queries = center.catalog.queries
    live, windows, misfit = queries.try_register(spec, center.now_ms(), lasts_ms=lasts_ms, change=change)
    known = {e.edge: e for e in center.catalog.edges.all()}
    if spec.edges is None:
        # Edges whose permissions or columns do not fit are listed too.
        expected = [e.edge for e in known.values() if not e.retired and e.stream(spec.stream)]
    else:
        expected = [EdgeId(edge) for edge in spec.edges]
    return {
        "spec": cast(Spec, spec.to_mapping(seed=False)),
        "sql": to_sql(spec, seed=False),
        "columns": [{"name": n, "type": k} for n, k in columns_of(empty_table(center.catalog, spec))],
        "registered": live is not None,
        "begins": border(windows.from_ms),
        "until": border(windows.until_ms),
        "refused": None if misfit is None or live is not None else misfit.message,
        "entry_bytes": {m.name: m.entry_bytes for m in spec.measures},
        "notes": [*spec.notes, *_stream_notes(spec.stream, known.values())],
        "forecast": link_forecast(center, spec, None, known, center.now_ms()),
        "edges": [_would_accept(edge, known.get(edge), spec) for edge in sorted(expected)],
    }


def _stream_notes(stream: str, edges: Iterable[EdgeRecord]) -> list[str]:
    """Returns a note if no edge serves the stream, but an edge serves a stream with a similar name."""
    served = {s.name for edge in edges for s in edge.streams if not edge.retired}
    near = did_you_mean(stream, sorted(served))
    return [f"from: no edge serves the stream {stream}{near}"] if near and stream not in served else []


def _would_accept(edge: EdgeId, record: EdgeRecord | None, spec: QuerySpec) -> DryRunEdge:
    """Returns whether an edge would accept the query, as far as its columns and its release show."""
    if record is None:
        return {"edge": edge, "accepted": None, "code": "never-connected", "message": f"{edge} has never connected"}
    stream = record.stream(spec.stream)
    if stream is None:
        text = f"{edge} does not serve stream {spec.stream}"
        return {"edge": edge, "accepted": False, "code": "invalid-query", "message": text}
    if not stream.answers(spec):
        text = f"{edge} may not answer queries named {spec.name}"
        return {"edge": edge, "accepted": False, "code": "forbidden", "message": text}
    try:
        spec.bind(stream.columns)
    except InvalidQuery as exc:
        return {"edge": edge, "accepted": False, "code": exc.code, "message": exc.message}
    if not record.release and spec.newer_keys:
        text = f"{edge} has not stated its release, and release 0.3.0 refuses {', '.join(spec.newer_keys)}"
        return {"edge": edge, "accepted": None, "code": "old-release", "message": text}
    return {"edge": edge, "accepted": True, "code": None, "message": None}


def read_query(body: bytes, content_type: str, name: str | None = None) -> QuerySpec:
    """Returns the query of a body. Raises InvalidQuery and HttpProblem; takes time that is linear in the body.

    Args:
        name: the name that the query has, or gets.
    """
    mapping = read_document(body, content_type, "a query")
    if name is not None and isinstance(mapping, dict):
        mapping = {"name": name, **mapping}
        if mapping["name"] != name:
            raise InvalidQuery("name", mapping["name"], f"{name}, as in the path; a query keeps its name")
    return read_spec(lambda: QuerySpec.from_mapping(mapping))


def read_spec(read: Callable[[], QuerySpec]) -> QuerySpec:
    """Returns the query that `read` makes.

    Raises InvalidQuery also for what only queries of earlier releases may have: a group that is too large for a frame,
    and a condition as the argument of a function of numbers.
    """
    spec = read()
    for measure in spec.measures:
        measure.require_no_condition()
    require_fit({m.name: m.entry_bytes for m in spec.measures})
    return spec


def _register(
    center: Services, spec: QuerySpec, lasts_ms: int | None, change: Change | None, caller: Principal
) -> Response:
    def spend() -> None:
        # Within the transaction: registering an equal query again costs nothing, and the catalog is read once.
        from_thread.run(center.rates.spend, caller, "registrations")

    seed = center.draw_seed()
    if change is not None:
        change = replace(change, answered_ms=answered_ms(center, spec.name))
    query, created = center.catalog.queries.register(
        spec, center.now_ms(), seed, lasts_ms=lasts_ms, change=change, before_new=spend
    )
    edges = {e.edge: e for e in center.catalog.edges.all()}
    notes = [*query.spec.notes, *_stream_notes(spec.stream, edges.values())]
    forecast = link_forecast(center, query.spec, query.ref, edges, query.registered_at_ms)
    answer = {**models.registered(query), "notes": notes or None, "forecast": forecast}
    return JSONResponse(
        {name: member for name, member in answer.items() if member is not None},
        201 if created else 200,
        {"Location": f"/v1/queries/{query.ref.name}", "ETag": f'"{query.ref.version}"'},
    )


class DetailParams(Params):
    format: Literal["json", "sql"] = "json"
    """`sql`: the statement that registers the query, without its seed."""
    version: Annotated[int | None, Field(ge=1, le=1 << 31)] = None
    """Default: the newest one."""


@router.get(
    "/{name}",
    dependencies=[READS_QUERY, IN_TURN],
    summary="One query and each edge's status",
    response_model=QueryDetail,
    responses={200: {"content": {SQL: {"schema": {"type": "string"}}}}},
)
def query(
    name: str, params: Annotated[DetailParams, Query()], center: Center, response: Response
) -> QueryDetail | Response:
    """The `ETag` names the version, for `If-Match` of a change."""
    versions = versions_of(center, name, None)
    query = versions_of(center, name, params.version)[-1]
    response.headers["ETag"] = f'"{query.ref.version}"'
    if params.format == "sql":
        return Response(to_sql(query.asked, seed=False), media_type=SQL, headers={"ETag": response.headers["ETag"]})
    edges = {e.edge: e for e in center.catalog.edges.all()}
    statuses = center.catalog.queries.statuses(query.ref)
    expected = expected_edges(query.spec, edges.values())
    latest, shipped = center.results.latest(query.ref), center.results.shipped(query.ref)
    late: dict[str, dict[str, int]] = {}
    for (_, edge, reason), records in center.results.late_records(query.ref).items():
        late.setdefault(edge, {})[reason] = records
    now_ms = center.now_ms()
    by_edge = [
        models.query_edge(
            edge_progress(edge, edges.get(edge), query.spec.stream, now_ms),
            edge in expected,
            statuses.get(edge),
            shipped.get(edge),
            late.get(edge, {}),
        )
        for edge in sorted({*expected, *statuses, *map(EdgeId, shipped), *map(EdgeId, late)})
    ]
    return {
        **models.registered(query),
        "forecast": link_forecast(center, query.spec, query.ref, edges, query.registered_at_ms),
        "edges": by_edge,
        "latest_window": rfc3339(latest.window_start_ms) if latest else None,
        "after_final": sum(n for e in by_edge for n in e["after_final"].values()),
        "rejected": sum(n for e in by_edge for n in e["rejected"].values()),
        "guessed": sum(n for e in by_edge for n in e["guessed"].values()),
        "versions": [models.query_version(version) for version in versions],
        "alarms": [models.alarm_json(a) for a in center.catalog.alarms.latest(query=query.key)],
    }


@router.get("/{name}/status", dependencies=[READS_QUERY, IN_TURN], summary="Whether a query has answers, and why not")
def status(name: str, center: Center, caller: Caller) -> QueryStatus:
    """Returns which edges the query waits for, since when, and what to do."""
    return query_status(center, caller, center.catalog.queries.get(name))


def query_status(center: Services, reader: Principal, query: RegisteredQuery) -> QueryStatus:
    """Returns the status of a query at this moment. The reason of an unready component may name other queries."""
    sees_all = reader.may("reader", None)
    latest, now_ms = center.results.latest(query.ref), center.now_ms()
    heartbeats = center.components.heartbeats()
    components = (component_status(c, heartbeats, now_ms) for c in COMPONENTS if c != "api")
    merged = center.results.consumed().get(query.key, 0)
    return explain(
        query,
        center.catalog.edges.all(),
        center.catalog.queries.statuses(query.ref),
        latest_ms=None if latest is None else latest.window_start_ms,
        withheld=latest is not None and bool(latest.facts.withheld),
        unmerged=max(0, center.catalog.frames.last_positions().get(query.key, 0) - merged),
        set_aside=center.catalog.quarantine.queries().get(query.ref),
        not_ready=[f"{c.component}: {c.reason if sees_all else 'not ready'}" for c in components if not c.ready],
        now_ms=now_ms,
    )


@router.delete("/{name}", dependencies=[EDITS_QUERY], status_code=204, summary="Delete a query")
def delete(name: str, center: Center) -> None:
    """Deletes all its versions and their answers. The name may be registered again and gets the next version."""
    center.catalog.queries.delete(name, center.now_ms())
