"""Sinks: systems that the center writes answers to."""

from __future__ import annotations

from typing import Annotated, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from center.api.access import ADMINISTERS, IN_TURN, READS_ALL
from center.api.bodies import read_document, read_typed_body
from center.api.measure_models import ApiModel
from center.api.openapi import json_body, problems
from center.api.services import Center, Services
from center.api.time_params import FromParams
from center.sinks import SinkStatus, read_definition
from center.sinks.alert_states import saved_states
from center.sinks.process import end_alarms, lag_of
from center.sinks.store import WaitingQuery
from edgewater.base.errors import Conflict, InvalidConfig, InvalidRequest, NotFound
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import Document
from edgewater.model.replies import ListedSink, SinkQueryState
from edgewater.wire import QueryRef

router = APIRouter(prefix="/v1/sinks", tags=["sinks"])
_EXAMPLE: Document = {"kind": "postgres", "url": {"env": "WAREHOUSE_URL"}, "queries": ["flights"]}


def query_state(ref: QueryRef, waiting: WaitingQuery, center: Services) -> SinkQueryState:
    behind, _, first_ms = center.results.lag(ref, waiting.answer_id, 0)
    return {
        "query": ref.name,
        "version": ref.version,
        "answer_id": waiting.answer_id,
        "behind_answers": behind,
        "behind_ms": 0 if first_ms is None else max(0, center.now_ms() - first_ms),
        "problem": waiting.problem or None,
        "failing_since": rfc3339(waiting.problem_since_ms) if waiting.problem_since_ms else None,
    }


def sink_state(status: SinkStatus, center: Services) -> ListedSink:
    now_ms = center.now_ms()
    lag, has_process = lag_of(status, center.results, now_ms), status.is_run(now_ms)
    state: Literal["running", "failing", "waiting"] = "running" if has_process else "waiting"
    return {
        "name": status.name,
        "definition": status.definition,
        "state": "paused" if status.paused else "failing" if status.problem else state,
        "problem": status.problem or None,
        "failing_since": rfc3339(status.problem_since_ms) if status.problem_since_ms else None,
        "answer_id": max(0, status.answer_id),
        "behind_answers": lag.answers,
        "behind_ms": lag.age_ms,
        "queries": [query_state(ref, query, center) for ref, query in status.waiting.items()],
        "answers": status.answers,
        "rows": status.rows,
        "refused": status.refused,
        "refusal": status.refusal or None,
        "gap": None if status.gap is None else {"first": status.gap[0], "last": status.gap[1]},
        "owner": status.owner if has_process else None,
    }


class SinkList(ApiModel):
    sinks: list[ListedSink]


@router.get("", dependencies=[READS_ALL, IN_TURN], summary="The sinks and their progress")
def sinks(center: Center) -> SinkList:
    return SinkList(sinks=[sink_state(status, center) for status in center.sinks.statuses()])


@router.get("/{name}", dependencies=[READS_ALL, IN_TURN], summary="One sink")
def sink(name: str, center: Center) -> ListedSink:
    return sink_state(center.sinks.status(name), center)


@router.put(
    "/{name}",
    dependencies=[ADMINISTERS],
    summary="Define or change a sink",
    response_model=ListedSink,
    responses={201: {"model": ListedSink}, **problems(409)},
    openapi_extra=json_body(_EXAMPLE),
)
async def define(name: str, request: Request, center: Center) -> Response:
    """Defines a sink. A changed sink continues after the last answer that it has.

    A secret is `{"env": NAME}` or `{"file": PATH}`, which the process `edgewater center sink` reads. The setting
    `sink.secrets` of the center's file lists the names and paths. A sink of the center's file can be changed only there
    (409).
    """
    body, content_type = await read_typed_body(request, center.limits.body_ms / 1000)
    return await run_sync(_define, center, name, body, content_type, limiter=center.parsing)


def _define(center: Services, name: str, body: bytes, content_type: str) -> Response:
    document = read_document(body, content_type, "a sink")
    try:
        definition = read_definition(name, document, listed=center.sink_secrets, reads_secrets=False, field="")
    except InvalidConfig as exc:
        raise InvalidRequest(exc.field.removeprefix(f"{name}."), exc.value, exc.accepted, exc.reason) from None
    try:
        is_configured = center.sinks.status(name).definition is None
    except NotFound:
        is_configured = False
    if is_configured:
        raise Conflict(f"sink {name} is in the center's file: change it there, or delete it here once it is gone there")
    if definition.kind.name != "alerts" and _has_alerts(center, name):
        raise Conflict(
            f"sink {name} has alerts, which would never end: delete it, and let them end, or use another name"
        )
    is_new = center.sinks.define(name, definition.document)
    state = sink_state(center.sinks.status(name), center)
    return JSONResponse(state, 201 if is_new else 200, {"Location": f"/v1/sinks/{name}"})


def _has_alerts(center: Services, name: str) -> bool:
    return any(sink == name for sink, _ in saved_states(center.sinks))


@router.delete("/{name}", dependencies=[ADMINISTERS], status_code=204, summary="Delete a sink")
def remove(name: str, center: Center) -> None:
    """Removes a sink. The answers that it has written stay in its target.

    The process of the sinks ends the alerts of a sink of the kind `alerts` at its targets.
    """
    status = center.sinks.status(name)
    # A process continues with a sink of its file.
    is_over = status.definition is not None or not status.is_run(center.now_ms())
    center.sinks.remove(name, ends=is_over and _has_alerts(center, name))
    end_alarms(center.catalog, name)


@router.post("/{name}/pause", dependencies=[ADMINISTERS], summary="Pause a sink")
def pause(name: str, center: Center) -> ListedSink:
    """Pauses a sink. For `retention.sinks`, the center keeps the answers that the sink has not written."""
    center.sinks.pause(name, True)
    return sink(name, center)


@router.post("/{name}/resume", dependencies=[ADMINISTERS], summary="Resume a sink")
def resume(name: str, center: Center) -> ListedSink:
    center.sinks.pause(name, False)
    return sink(name, center)


@router.post("/{name}/replay", dependencies=[ADMINISTERS], summary="Write answers again")
def replay(name: str, params: Annotated[FromParams, Query()], center: Center) -> ListedSink:
    """Writes stored answers again: all that were given since the first answer to a window that starts at `from` or
    later.

    A sink replaces its answers, so repetitions do no harm.
    """
    first = None if params.start is None else center.results.first_answer_from(params.start)
    center.sinks.replay(name, 0 if params.start is None else (first or center.results.last_answer_id() + 1) - 1)
    return sink(name, center)
