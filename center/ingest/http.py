"""What a gateway shows of itself over HTTP: ``/livez``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from center.ingest.gateway import Gateway


def observe(gateway: Gateway) -> Starlette:
    """The application. ``/readyz`` is 503, and says why, while frames are not acknowledged."""

    async def livez(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> Response:
        missing = gateway.readiness()
        return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics)])
