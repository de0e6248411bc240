"""Alerts: the state of the rules of sinks of the kind `alerts`, and the result of new rules on stored answers."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field, JsonValue

from center.api.access import IN_TURN, READS, Caller, require
from center.api.bodies import read_document, read_typed_body
from center.api.measure_models import ApiModel
from center.api.openapi import OpenApi, problems
from center.api.services import Center, Services
from center.api.time_params import FromParams
from center.sinks import read_definition
from center.sinks.alert_check import RuleReport, check_rules
from center.sinks.alert_states import RuleState, saved_states
from center.sinks.alert_targets import AlertState
from center.sinks.alerts import AlertsConfig, stated
from edgewater.model.errors import InvalidConfig, InvalidRequest
from edgewater.model.timestamps import rfc3339

router = APIRouter(prefix="/v1/alerts", tags=["sinks"])
_EXAMPLE = {
    "kind": "alerts",
    "targets": {"oncall": {"alertmanager": {"url": "http://127.0.0.1:9093"}}},
    "rules": [{"alert": "many", "query": "flights", "certainly": "n > 100"}],
}
_BODY: OpenApi = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}, "example": _EXAMPLE}},
    }
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


class CheckedAlert(ApiModel):
    """An alert that would have begun to fire, or would have been resolved."""

    status: str
    at: str
    """When the answer was given."""
    labels: dict[str, str]
    details: dict[str, JsonValue]


class CheckedRule(ApiModel):
    """A rule, and what it would have done."""

    rule: str
    query: str
    condition: str
    problem: str | None
    """Why it cannot be evaluated."""
    fired: int
    """How often an alert would have begun to fire."""
    changes: list[CheckedAlert]
    """The first 100."""

    @classmethod
    def of(cls, report: RuleReport) -> CheckedRule:
        rule, changes = report.rule, []
        for change in report.transitions:
            alert = stated(rule, change.alert, change.status)
            at, details = rfc3339(change.at_ms), dict(alert["details"])
            changes.append(CheckedAlert(status=alert["status"], at=at, labels=alert["labels"], details=details))
        return cls(
            rule=rule.name,
            query=rule.query,
            condition=rule.text,
            problem=report.problem or None,
            fired=report.fired,
            changes=changes,
        )


class RuleCheck(ApiModel):
    rules: list[CheckedRule]
    answers: int
    """Answers that were evaluated: the newest stored revision of each window."""
    is_whole: bool
    """Whether these are all. Otherwise later ones were left out."""


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
    responses=problems(404, 408, 413, 415, 422),
    openapi_extra=_BODY,
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
    report = check_rules(
        [section.rule() for section in options.rules],
        center.catalog,
        center.results,
        start_ms=start_ms,
        now_ms=center.now_ms,
    )
    return RuleCheck(
        rules=[CheckedRule.of(rule) for rule in report.rules], answers=report.answers, is_whole=report.is_whole
    )
