"""Tables that queries look up columns in."""

from __future__ import annotations

from typing import Annotated

from anyio import from_thread
from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from center.api.access import EDITS_TABLE, IN_TURN, READS, READS_TABLE, Caller, caller
from center.api.bodies import read_body, require_media_type
from center.api.measure_models import Params
from center.api.openapi import OpenApi, problems
from center.api.routers.queries import answered_ms
from center.api.services import Center, Services
from center.api.table_bodies import READERS, read_table
from center.api.time_params import Time
from center.api_access import Principal
from center.catalog import TableRecord
from edgewater.base.errors import InvalidRequest
from edgewater.base.timestamps import rfc3339
from edgewater.model.lookups import MAX_TABLE_BYTES
from edgewater.model.measure import NAME, NAME_ACCEPTED
from edgewater.model.replies import TableDetail, TableInfo, TableList

router = APIRouter(prefix="/v1/tables", tags=["queries"])
_BODY: OpenApi = {
    "requestBody": {
        "required": True,
        "description": "The rows, each with a key of its own.",
        "content": {media_type: {"schema": {"type": "string"}} for media_type in READERS}
        | {"text/csv": {"schema": {"type": "string"}, "example": "device,hall\nd-1,H1\nd-2,H2\n"}},
    }
}


def table_info(table: TableRecord, reader: Principal) -> TableInfo:
    """Returns a table as a reader sees it, who may not read all queries."""
    return {
        "name": table.name,
        "version": table.version,
        "key": table.key,
        "columns": [{"name": name, "type": kind} for name, kind in table.types.items()],
        "rows": table.rows,
        "updated_at": rfc3339(table.updated_at_ms),
        "queries": [name for name in table.queries if reader.may("reader", name)],
    }


@router.get("", dependencies=[READS, IN_TURN], summary="The tables that the caller may read")
def tables(center: Center, caller: Caller) -> TableList:
    found = center.catalog.tables.all()
    return {"tables": [table_info(table, caller) for table in found if caller.may("reader", table.name)]}


@router.get("/{name}", dependencies=[READS_TABLE, IN_TURN], summary="One table and its rows")
def table(name: str, center: Center, caller: Caller) -> TableDetail:
    """Returns the newest version."""
    found, rows = center.catalog.tables.get(name)
    return {**table_info(found, caller), "data": rows.to_pylist()}


class PutParams(Params):
    key: str | None = None
    """The column that tells the rows apart. Default: the first column."""
    at: Time | None = None
    """As `at` of a change of a query: from this time on, queries that use the table use the new version."""


@router.put(
    "/{name}",
    dependencies=[EDITS_TABLE],
    summary="Make or change a table",
    response_model=TableInfo,
    openapi_extra=_BODY,
    responses={
        200: {"model": TableInfo, "description": "The newest version has the same rows."},
        201: {"model": TableInfo, "description": "The new version."},
        **problems(409),
    },
)
async def put(name: str, params: Annotated[PutParams, Query()], request: Request, center: Center) -> Response:
    """Stores the rows that queries look up with `lookup`. Each running query that uses the table gets a new version.

    Windows that start before the border of a query keep the rows that they had. If a query does not fit the new rows,
    nothing changes (422).
    """
    if not NAME.fullmatch(name):
        raise InvalidRequest("name", name, NAME_ACCEPTED)
    media_type = require_media_type(request.headers.get("content-type", ""), READERS)
    body = await read_body(request, center.limits.body_ms / 1000, MAX_TABLE_BYTES)
    return await run_sync(_put, center, name, body, media_type, params, caller(request), limiter=center.registering)


def _put(
    center: Services, name: str, body: bytes, media_type: str, params: PutParams, principal: Principal
) -> Response:
    key, rows = read_table(body, media_type, params.key)
    from_thread.run(center.rates.spend, principal, "registrations")
    users = {query for table in center.catalog.tables.all() if table.name == name for query in table.queries}
    answered = {query: answered_ms(center, query) for query in users}
    table, created = center.catalog.tables.put(name, key, rows, center.now_ms(), params.at, answered)
    headers = {"Location": f"/v1/tables/{name}"}
    return JSONResponse(table_info(table, principal), 201 if created else 200, headers)


@router.delete(
    "/{name}", dependencies=[EDITS_TABLE], status_code=204, summary="Delete a table", responses=problems(409)
)
def delete(name: str, center: Center) -> None:
    """Deletes all versions of a table. While a running query uses it, the center refuses (409)."""
    center.catalog.tables.delete(name)
