"""Frames that the job could not apply."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from center.api.access import IN_TURN, READS_ALL
from center.api.models import QuarantinedFrame, QuarantineList
from center.api.openapi import problems
from center.api.services import Center

MAX_POSITION = (1 << 63) - 1
"""The greatest number that a database stores."""

router = APIRouter(prefix="/v1/quarantine", tags=["alarms"])


@router.get("", dependencies=[READS_ALL, IN_TURN], summary="Frames that could not be applied, the latest first")
def quarantine(center: Center) -> QuarantineList:
    """Their windows state them as lost. Their bytes are kept: see `edgewater center quarantine --help`."""
    return QuarantineList(frames=[QuarantinedFrame.of(frame) for frame in center.catalog.quarantine.frames()])


@router.get(
    "/{query}/{position}", dependencies=[READS_ALL, IN_TURN], responses=problems(404, 422), summary="One of them"
)
def quarantined_frame(
    center: Center, query: str, position: Annotated[int, Path(ge=1, le=MAX_POSITION)]
) -> QuarantinedFrame:
    """By the query's key, `name@version`, and the frame's position."""
    return QuarantinedFrame.of(center.catalog.quarantine.frame(query, position))
