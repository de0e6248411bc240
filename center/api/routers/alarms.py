"""What must not happen and did."""

from __future__ import annotations

from fastapi import APIRouter

from center.api.models import Alarm, AlarmList
from center.api.state import Center

router = APIRouter(prefix="/v1", tags=["alarms"])


@router.get("/alarms", summary="Alarms, the latest first")
def alarms(center: Center) -> AlarmList:
    """Violations of what the protocol promises, such as one frame number with two contents."""
    return AlarmList(alarms=[Alarm.of(a) for a in center.catalog.alarms()])
