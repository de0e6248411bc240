"""Liveness of this process and readiness of the center. Never requires a token."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from center.api.models import ComponentReadiness, Readiness
from center.api.services import Center, Services
from center.catalog import COMPONENTS, component_status
from edgewater.errors import StorageError
from edgewater.health import metrics_response

router = APIRouter(tags=["health"])


@router.get("/livez", summary="Liveness of this process")
async def livez() -> dict[str, bool]:
    return {"live": True}


@router.get(
    "/readyz",
    summary="Readiness of the center",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Not ready; `missing` says why."}},
)
def readyz(center: Center) -> Response:
    """Gateway, job and API must send heartbeats, and both stores must be reachable. Answers are served anyway."""
    readiness = _readiness(center)
    return JSONResponse(readiness.model_dump(), 200 if readiness.ready else 503, {"Cache-Control": "no-store"})


def _readiness(center: Services) -> Readiness:
    missing = []
    try:
        center.results.last_answer_id()
    except StorageError as exc:
        missing.append(f"results: {exc.message}")
    try:
        heartbeats = center.components.heartbeats()
    except StorageError as exc:
        return Readiness(ready=False, missing=[*missing, f"catalog: {exc.message}"], components={})
    now_ms = center.now_ms()
    components: dict[str, ComponentReadiness] = {}
    for component in COMPONENTS:
        status = component_status(component, heartbeats, now_ms)
        components[component] = ComponentReadiness(
            ready=status.ready,
            reason=status.reason or None,
            address=status.address or None,
            instances=status.instances,
        )
        if not status.ready:
            missing.append(f"{component}: {status.reason}")
    return Readiness(ready=not missing, missing=missing, components=components)


@router.get("/metrics", summary="Metrics in Prometheus' text format", response_class=Response)
def metrics(center: Center) -> Response:
    return metrics_response(center.metrics.registry)
