"""Streams: the columns that their edges have. The configuration or an admin may declare the accepted columns."""

from __future__ import annotations

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request

from center.api.access import ADMINISTERS, IN_TURN, READS
from center.api.bodies import read_document, read_typed_body
from center.api.models import stream_columns
from center.api.openapi import json_body, problems
from center.api.services import Center, Services
from center.config import Columns
from edgewater.base.errors import InvalidConfig, InvalidRequest
from edgewater.model.json_types import Document
from edgewater.model.measure import NAME
from edgewater.model.replies import StreamColumns, StreamList
from edgewater.runtime.configuration import Section, validate

_EXAMPLE: Document = {"columns": {"carrier": "string", "distance": {"type": "int64", "description": "miles"}}}


class DeclaredColumns(Section):
    """The body of a declaration."""

    columns: Columns


router = APIRouter(prefix="/v1/streams", tags=["edges"])


@router.get("", dependencies=[READS, IN_TURN], summary="The streams, and their columns")
def streams(center: Center) -> StreamList:
    """Lists the streams with declared columns, and the streams of edges that are not retired."""
    return {"streams": stream_columns(center.catalog.streams.declared(), center.catalog.edges.all())}


@router.put(
    "/{stream}/columns",
    dependencies=[ADMINISTERS],
    summary="Declare a stream's columns",
    responses=problems(409),
    openapi_extra=json_body(_EXAMPLE),
)
async def declare_columns(stream: str, request: Request, center: Center) -> StreamColumns:
    """Declares a stream's columns. Edges with another column, or another type, are refused until they are corrected.

    The configuration may declare the columns of a stream. They can be changed only there (409).
    """
    body, content_type = await read_typed_body(request, center.limits.body_ms / 1000)
    return await run_sync(_declare, center, stream, body, content_type, limiter=center.parsing)


def _declare(center: Services, stream: str, body: bytes, content_type: str) -> StreamColumns:
    if not NAME.fullmatch(stream):
        raise InvalidRequest("stream", stream, "a stream's name")
    try:
        columns = validate(DeclaredColumns, read_document(body, content_type, "columns of a stream")).columns
    except InvalidConfig as exc:
        raise InvalidRequest(exc.field, exc.value, exc.accepted, exc.reason) from None
    center.catalog.streams.declare(stream, columns)
    listed = stream_columns(center.catalog.streams.declared(), center.catalog.edges.all())
    return next(s for s in listed if s["stream"] == stream)


@router.delete(
    "/{stream}/columns",
    dependencies=[ADMINISTERS],
    status_code=204,
    summary="Let the edges decide again",
    responses=problems(409),
)
def undeclare_columns(stream: str, center: Center) -> None:
    """Removes a declaration. The stream then has the columns of its edges.

    The first edge with a column decides the column's type.
    """
    center.catalog.streams.undeclare(stream)
