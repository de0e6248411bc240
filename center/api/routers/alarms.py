"""Alarms: violations of invariants."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from center.api.access import IN_TURN, READS_ALL
from center.api.models import alarm_json
from center.api.openapi import problems
from center.api.services import Center
from center.catalog.alarms import MAX_LISTED
from edgewater.model.replies import AlarmList

router = APIRouter(prefix="/v1", tags=["alarms"])


@router.get("/alarms", dependencies=[READS_ALL, IN_TURN], responses=problems(422), summary="Alarms, the latest first")
def alarms(
    center: Center, limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Alarms at most.")] = MAX_LISTED
) -> AlarmList:
    """Lists violations of the protocol's guarantees, such as one frame number with two contents.

    If there are more than `limit`, each edge has an equal share. Alarms without an edge are shared among their queries.
    """
    return {"alarms": [alarm_json(a) for a in center.catalog.alarms.latest(limit)]}
