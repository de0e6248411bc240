"""Alerts: what the rules of the sinks of the kind `alerts` say now."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from center.api.access import IN_TURN, READS, Caller
from center.api.services import Center
from center.sinks.alerts import SHOWN

router = APIRouter(prefix="/v1/alerts", tags=["sinks"])


class FiringAlert(BaseModel):
    """An alert."""

    sink: str = Field(description="The sink whose rule it is.")
    rule: str
    query: str
    status: str = Field(description="`firing`, or `pending` until its condition has held for long enough.")
    labels: dict[str, str] = Field(description="`alertname`, `query`, the groups, and the labels of the rule.")
    annotations: dict[str, str]
    since: str = Field(description="Start of the first window in which the condition held without interruption.")
    starts_at: str | None = Field(description="When it began to fire.")
    details: dict[str, Any] = Field(description="Values with bounds, window, phase and revision of the last answer.")


class AlertList(BaseModel):
    alerts: list[FiringAlert]


@router.get("", dependencies=[READS, IN_TURN], summary="The alerts that fire or are pending")
def alerts(center: Center, caller: Caller) -> AlertList:
    """Of the queries that the caller may read."""
    shown = [
        FiringAlert(sink=name, **{key: value for key, value in alert.items() if key != "ends_at"})
        for name, text in sorted(center.sinks.memories().items())
        for alert in json.loads(text).get(SHOWN, ())
        if caller.may("reader", alert["query"])
    ]
    return AlertList(alerts=shown)
