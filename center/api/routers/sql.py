"""Statements in SQL: queries as materialized views, lists, and tables of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import pyarrow as pa
from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from center.api.access import READS, begin_edit, caller, require
from center.api.bodies import read_document, read_typed_body
from center.api.measure_models import ApiModel, Params
from center.api.models import stream_columns
from center.api.negotiation import SQL, negotiate
from center.api.openapi import OpenApi, problems
from center.api.problems import HttpProblem
from center.api.routers.queries import read_spec, register_query
from center.api.services import Center, Services
from center.api.sql_select import check_select
from center.api.sql_tables import query_table, rows_table
from center.api.time_params import EndTime, Time
from center.api_access import Principal
from center.catalog import Change
from center.serving.answer_tables import empty_table, with_version
from edgewater.base.errors import InvalidQuery, InvalidRequest, NotFound, did_you_mean
from edgewater.model.own_columns import own_names
from edgewater.model.replies import DryRun, Registered, TableColumn
from edgewater.model.sql import (
    CreateQuery,
    DescribeTable,
    DropQuery,
    SelectRows,
    ShowCreate,
    Statement,
    parse_statement,
    to_sql,
)
from edgewater.model.table_texts import ARROW, CSV, JSON, columns_of, rendered

router = APIRouter(prefix="/v1/sql", tags=["sql"])
TEXT, INT = pa.string(), pa.int64()
LESS = "fewer windows, with the parameters start and end or with WHERE window_start >= …"


class SqlTable(ApiModel):
    """The rows of SELECT, SHOW CREATE and DESCRIBE."""

    columns: list[TableColumn]
    rows: list[list[Any]]
    """Values in the order of the columns; times are RFC 3339."""


class DroppedQuery(ApiModel):
    """The reply to DROP."""

    dropped: str | None
    """The query. Null: there is none, and the statement has IF EXISTS."""


class SqlParams(Params):
    format: Annotated[Literal["json", "csv", "arrow"] | None, Field(examples=["arrow"])] = None
    """The form of a table; overrides `Accept`."""
    start: Time | None = None
    """SELECT reads no window that starts before. Inclusive."""
    end: EndTime = None
    """SELECT reads no window that starts later. Exclusive."""


_EXAMPLE = (
    "CREATE MATERIALIZED VIEW bytes_by_host WITH (staleness = '2s') AS\n"
    "SELECT host, sum(bytes) AS bytes FROM access GROUP BY TUMBLE(INTERVAL '1 minute'), host"
)
_BODY: OpenApi = {
    "requestBody": {
        "required": True,
        "description": "One statement: as text, or as JSON with the member `sql`.",
        "content": {
            SQL: {"schema": {"type": "string"}, "example": _EXAMPLE},
            JSON: {
                "schema": {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
                "example": {"sql": "DESCRIBE bytes_by_host"},
            },
        },
    }
}


@router.post(
    "",
    dependencies=[READS],
    summary="Run a statement in SQL",
    response_model=None,
    openapi_extra=_BODY,
    responses={
        200: {
            "model": SqlTable | Registered | DryRun | DroppedQuery,
            "description": "The rows of SELECT, SHOW CREATE and DESCRIBE, as JSON, CSV or an Arrow IPC stream; what"
            " EXPLAIN says; the query that CREATE has registered already; the query that DROP has deleted.",
            "content": {CSV: {"schema": {"type": "string"}}, ARROW: {"schema": {"type": "string", "format": "binary"}}},
        },
        201: {"model": Registered, "description": "The query that CREATE has registered."},
        **problems(403, 404, 406, 409),
    },
)
async def run_statement(params: Annotated[SqlParams, Query()], request: Request, center: Center) -> Response:
    """`CREATE [OR REPLACE] MATERIALIZED VIEW` registers a query, and `DROP MATERIALIZED VIEW` deletes one.

    `EXPLAIN CREATE …` returns what a registration would do. `SHOW CREATE q` returns the statement of a query, and
    `DESCRIBE` the columns of a stream or a query.

    `SELECT` reads answers: each query is a table with a row per window and group, and `DESCRIBE` lists its columns. It
    runs on DuckDB for at most 3 s, in 512 MiB, with a fixed list of functions.

    A request has one statement. Each statement needs the role that the endpoint for the same task needs.
    """
    body, content_type = await read_typed_body(request, center.limits.body_ms / 1000)
    statement = await run_sync(_read_statement, body, content_type, limiter=center.parsing)
    match statement:
        case CreateQuery():
            return await _create(request, center, statement)
        case DropQuery():
            return await _drop(request, center, statement)
    form = negotiate(request.headers.get("accept"), params.format)
    async with center.turns.taken(caller(request)):
        if isinstance(statement, SelectRows):
            make = partial(_selected, request, center, statement.text, params, form)
            limits = replace(center.costly.limits, less=LESS)
            return Response(await center.costly.run(request, make, limits), media_type=form)
        listing = _listing(request, center, statement)
        return Response(await run_sync(lambda: rendered(listing(), form)), media_type=form)


def _read_statement(body: bytes, content_type: str) -> Statement:
    """Returns the statement of a body. A form or plain text is refused: pages of other sites may send these."""
    if content_type.partition(";")[0].strip().lower() == SQL:
        try:
            return parse_statement(body.decode())
        except UnicodeDecodeError as exc:
            raise InvalidQuery("sql", body[:200].decode(errors="replace"), "text in UTF-8", str(exc)) from None
    try:
        given = read_document(body, content_type, "a statement", (JSON,))
    except HttpProblem as problem:
        raise HttpProblem(problem.code, f"{problem}, {SQL}", {"Accept-Post": f"{SQL}, {JSON}"}) from None
    if not isinstance(given, dict) or set(given) != {"sql"} or not isinstance(given["sql"], str):
        raise InvalidRequest("sql", given, '{"sql": "DESCRIBE bytes_by_host"}')
    return parse_statement(given["sql"])


async def _create(request: Request, center: Services, statement: CreateQuery) -> Response:
    spec = await run_sync(read_spec, statement.spec, limiter=center.parsing)
    if not statement.explains:
        await begin_edit(request, spec.name)
    change = Change() if statement.replaces else None
    return await register_query(request, center, spec, dry_run=statement.explains, change=change)


async def _drop(request: Request, center: Services, statement: DropQuery) -> Response:
    await begin_edit(request, statement.name)
    dropped = None
    try:
        require(request, "reader", statement.name)
        require(request, "editor", statement.name)
        await run_sync(center.catalog.queries.delete, statement.name, center.now_ms())
        dropped = statement.name
    except NotFound:
        if not statement.if_exists:
            raise
    return JSONResponse(DroppedQuery(dropped=dropped).model_dump())


def _selected(request: Request, center: Services, text: str, params: SqlParams, form: str) -> bytes:
    """Returns the rows of a SELECT over the answers of queries that the caller may read."""
    checked = check_select(text)
    for name in checked.tables:
        require(request, "reader", name)
    tables: dict[str, pa.Table] = {}
    for name in checked.tables:
        versions = center.catalog.queries.versions(name)
        start, end = checked.start_ms, checked.end_ms
        columns = [name for q in versions for name in (*q.spec.group_by, *q.spec.shown)]
        if own_names(columns)["window_start"] != "window_start":
            start, end = None, None  # the query has a column of its own with this name
        start = max((ms for ms in (start, params.start) if ms is not None), default=None)
        end = min((ms for ms in (end, params.end) if ms is not None), default=None)
        tables[name] = query_table(center, versions, start, end)
    return center.sql.run(checked.text, tables, form)


def _listing(request: Request, center: Services, statement: Statement) -> Callable[[], pa.Table]:
    """Returns the function that makes the table of a statement; it blocks."""
    match statement:
        case ShowCreate():
            require(request, "reader", statement.name)
            return lambda: _show_create(center, statement.name)
        case DescribeTable():
            return lambda: _describe(center, caller(request), statement)
    raise AssertionError(statement)


def _show_create(center: Services, name: str) -> pa.Table:
    text = to_sql(center.catalog.queries.get(name).asked, seed=False)
    return rows_table({"query": pa.string(), "sql": pa.string()}, [(name, text)])


def _describe(center: Services, reader: Principal, statement: DescribeTable) -> pa.Table:
    name, columns = statement.name, {"column": pa.string(), "type": pa.string(), "description": pa.string()}
    if statement.kind != "stream" and reader.may("reader", name):
        try:
            spec = center.catalog.queries.get(name).spec
            return rows_table(
                columns, [(n, k, "") for n, k in columns_of(with_version(empty_table(center.catalog, spec), 0))]
            )
        except NotFound:
            if statement.kind == "query":
                raise
    declared = center.catalog.streams.declared()
    listed = stream_columns(declared, center.catalog.edges.all()) if statement.kind != "query" else []
    stream = next((s for s in listed if s["stream"] == name), None)
    if stream is None:
        near = did_you_mean(name, [s["stream"] for s in listed])
        raise NotFound(f"{statement.kind or 'stream or query'} {name} is not known{near}")
    return rows_table(columns, [(c["name"], c["type"], c["description"]) for c in stream["columns"]])
