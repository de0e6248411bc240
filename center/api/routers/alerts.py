"""Alerts: the state of the rules of sinks of the kind `alerts`, and the result of new rules on stored answers."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field

from center.api.access import IN_TURN, READS, Caller, require
from center.api.bodies import read_document, read_typed_body
from center.api.measure_models import ApiModel
from center.api.openapi import json_body, problems
from center.api.services import Center, Services
from center.api.time_params import FromParams
from center.sinks import read_definition
from center.sinks.alert_check import RuleCheck, check_rules
from center.sinks.alert_states import RuleState, saved_states
from center.sinks.alert_targets import AlertState
from center.sinks.alerts import AlertsConfig
from edgewater.base.errors import InvalidConfig, InvalidRequest
from edgewater.model.json_types import Document

router = APIRouter(prefix="/v1/alerts", tags=["sinks"])
_EXAMPLE: Document = {
    "kind": "alerts",
    "targets": {"oncall": {"alertmanager": {"url": "http://127.0.0.1:9093"}}},
    "rules": [{"alert": "many", "query": "flights", "certainly": "n > 100"}],
}


class FiringAlert(AlertState):
    """An alert.

    It is `pending` until its condition has held for long enough, and then `firing`. `since` is the start of the first
    window in which the condition held without interruption. `details` has what the last answer says: `condition`
    (`holds` or `unknown`), values with bounds, window, phase and revision.
    """

    sink: Annotated[str, Field(description="The sink whose rule it is.")]


class AlertList(ApiModel):
    alerts: list[FiringAlert]


class SinkRule(RuleState):
    """A rule and its state."""

    sink: str


class RuleList(ApiModel):
    rules: list[SinkRule]


@router.get("", dependencies=[READS, IN_TURN], summary="The alerts that fire or are pending")
def alerts(center: Center, caller: Caller) -> AlertList:
    """Lists the alerts of the queries that the caller may read."""
    shown = [
        FiringAlert(**alert, sink=name)
        for name, state in saved_states(center.sinks)
        for alert in state.alerts
        if caller.may("reader", alert["query"])
    ]
    return AlertList(alerts=shown)


@router.get("/rules", dependencies=[READS, IN_TURN], summary="The rules and their states")
def rules(center: Center, caller: Caller) -> RuleList:
    """Lists the rules of the queries that the caller may read. A rule is listed after a process has run its sink."""
    shown = [
        SinkRule(**rule, sink=name)
        for name, state in saved_states(center.sinks)
        for rule in state.rules
        if caller.may("reader", rule["query"])
    ]
    return RuleList(rules=shown)


@router.post(
    "/check",
    dependencies=[READS, IN_TURN],
    summary="What rules would have done on the stored answers",
    responses=problems(404),
    openapi_extra=json_body(_EXAMPLE),
)
async def check(request: Request, params: Annotated[FromParams, Query()], center: Center) -> RuleCheck:
    """Evaluates the definition of a sink of the kind `alerts`. Defines nothing and notifies nobody."""
    body, content_type = await read_typed_body(request, center.limits.body_ms / 1000)
    check = partial(_check, request, center, body, content_type, params.start)
    return await center.costly.run(request, check)


def _check(request: Request, center: Services, body: bytes, content_type: str, start_ms: int | None) -> RuleCheck:
    document = read_document(body, content_type, "a sink of the kind alerts")
    try:
        options = read_definition("check", document, reads_secrets=False, field="").options
    except InvalidConfig as exc:
        field = exc.field.removeprefix("check").removeprefix(".")
        raise InvalidRequest(field, exc.value, exc.accepted, exc.reason) from None
    if not isinstance(options, AlertsConfig):
        raise InvalidRequest("kind", document.get("kind") if isinstance(document, dict) else None, "alerts")
    for query in sorted(options.reads):
        require(request, "reader", query)
    return check_rules(
        [section.rule() for section in options.rules],
        center.catalog,
        center.results,
        start_ms=start_ms,
        now_ms=center.now_ms,
    )
