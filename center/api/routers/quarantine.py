"""Frames and queries that the job has set aside."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from center.api.access import IN_TURN, READS_ALL
from center.api.models import QuarantinedFrame, QuarantineList, SetAsideQuery
from center.api.openapi import problems
from center.api.services import Center

MAX_POSITION = (1 << 63) - 1
"""The greatest number that a database stores."""

router = APIRouter(prefix="/v1/quarantine", tags=["alarms"])


@router.get("", dependencies=[READS_ALL, IN_TURN], summary="Frames and queries that are set aside")
def quarantine(center: Center) -> QuarantineList:
    """Lists the frames that could not be applied, and the queries that are set aside.

    Windows state the frames as lost, and their bytes are stored. Queries that are `paused` or `quarantined` get no
    answers, and their frames are stored. See `edgewater center quarantine --help`.
    """
    quarantine = center.catalog.quarantine
    return QuarantineList(
        frames=[QuarantinedFrame.of(frame) for frame in quarantine.frames()],
        queries=[SetAsideQuery.of(query) for query in quarantine.queries().values()],
    )


@router.get(
    "/{query}/{position}", dependencies=[READS_ALL, IN_TURN], responses=problems(404, 422), summary="One of them"
)
def quarantined_frame(
    center: Center, query: str, position: Annotated[int, Path(ge=1, le=MAX_POSITION)]
) -> QuarantinedFrame:
    """Returns a frame by the query's key, `name@version`, and the frame's position."""
    return QuarantinedFrame.of(center.catalog.quarantine.frame(query, position))
