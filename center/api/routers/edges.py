"""Edges, as their last Hello and heartbeat describe them."""

from __future__ import annotations

from fastapi import APIRouter

from center.api.access import ADMINISTERS, IN_TURN, READS
from center.api.models import edge_json
from center.api.services import Center
from edgewater.base.streams import EdgeId
from edgewater.model.replies import Edge, EdgeList

router = APIRouter(prefix="/v1/edges", tags=["edges"])


@router.get("", dependencies=[READS, IN_TURN], summary="All edges that ever connected")
def edges(center: Center) -> EdgeList:
    """Lists all edges. `up` and `unreachable` describe the connection. Watermarks show whether an edge has events."""
    now_ms = center.now_ms()
    return {"edges": [edge_json(e, now_ms) for e in center.catalog.edges.all()]}


@router.get("/{edge}", dependencies=[READS, IN_TURN], summary="One edge")
def edge(edge: str, center: Center) -> Edge:
    return edge_json(center.catalog.edges.get(edge), center.now_ms())


@router.delete("/{edge}", dependencies=[ADMINISTERS], status_code=204, summary="Retire an edge")
def retire(edge: str, center: Center) -> None:
    """Retires an edge: answers no longer need it, and the center accepts no frames from it.

    A retired edge that is connected, or connects again, accepts no more records. Its journal keeps all records that are
    not shipped.
    """
    center.catalog.edges.retire(EdgeId(edge))


@router.post("/{edge}/reinstate", dependencies=[ADMINISTERS], status_code=204, summary="Take a retirement back")
def reinstate(edge: str, center: Center) -> None:
    """Reinstates an edge: answers need it again. Restart its agent if it has received the retirement."""
    center.catalog.edges.reinstate(EdgeId(edge))
