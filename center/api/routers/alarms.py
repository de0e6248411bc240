"""Alarms, which are violations of invariants, and the frames and queries that the job has set aside."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from center.api.access import IN_TURN, READS_ALL
from center.api.models import QuarantinedFrame, QuarantineList, alarm_json, frame_json, set_aside_json
from center.api.services import Center
from center.catalog.alarms import MAX_LISTED
from edgewater.model.replies import AlarmList

MAX_POSITION = (1 << 63) - 1
"""The greatest number that a database stores."""

router = APIRouter(prefix="/v1", tags=["alarms"])


@router.get("/alarms", dependencies=[READS_ALL, IN_TURN], summary="Alarms, the latest first")
def alarms(
    center: Center, limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Alarms at most.")] = MAX_LISTED
) -> AlarmList:
    """Lists violations of the protocol's guarantees, such as one frame number with two contents.

    If there are more than `limit`, each edge has an equal share. Alarms without an edge are shared among their queries.
    """
    return {"alarms": [alarm_json(a) for a in center.catalog.alarms.latest(limit)]}


@router.get("/quarantine", dependencies=[READS_ALL, IN_TURN], summary="Frames and queries that are set aside")
def quarantine(center: Center) -> QuarantineList:
    """Lists the frames that could not be applied, and the queries that are set aside.

    Windows state the frames as lost, and their bytes are stored. Queries that are `paused` or `quarantined` get no
    answers, and their frames are stored. See `edgewater center quarantine --help`.
    """
    quarantine = center.catalog.quarantine
    return QuarantineList(
        frames=[frame_json(frame) for frame in quarantine.frames()],
        queries=[set_aside_json(query) for query in quarantine.queries().values()],
    )


@router.get("/quarantine/{query}/{position}", dependencies=[READS_ALL, IN_TURN], summary="One of them")
def quarantined_frame(
    center: Center, query: str, position: Annotated[int, Path(ge=1, le=MAX_POSITION)]
) -> QuarantinedFrame:
    """Returns a frame by the query's key, `name@version`, and the frame's position."""
    return frame_json(center.catalog.quarantine.frame(query, position))
