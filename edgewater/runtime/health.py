"""Operational HTTP endpoints of a process, and their server: ``/livez``, ``/readyz``, ``/metrics``."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edgewater.base.errors import InvalidConfig
from edgewater.runtime.configuration import split_address
from edgewater.runtime.connections import ConnectionLimits, GuardedServer, guarded
from edgewater.runtime.tasks import Tasks


def metrics_response(registry: CollectorRegistry) -> Response:
    """Returns the metrics of a registry in Prometheus' text format."""
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def health_routes(
    registry: CollectorRegistry, missing: Callable[[], list[str]], state: Callable[[], dict[str, str | None]] = dict
) -> list[Route]:
    """Returns the routes of the three endpoints.

    ``/livez`` answers 200 while the process runs. ``/readyz`` answers ``{"ready": …, "missing": […]}``, with status 503
    if something is missing.

    Args:
        missing: returns the reasons why the process cannot do its work. Called for every request, by any thread.
        state: returns further members of the reply of ``/readyz``.
    """

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reasons = missing()
        return JSONResponse({"ready": not reasons, "missing": reasons, **state()}, 503 if reasons else 200)

    async def metrics(_: Request) -> Response:
        return metrics_response(registry)

    return [Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics)]


def listen(address: str, field: str) -> socket.socket:
    """Opens a listening TCP socket. Raises InvalidConfig for the key `field` if the address is not available."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        raise InvalidConfig(field, address, "a free address of this machine", exc.strerror or str(exc)) from exc


def bound_address(listener: socket.socket) -> str:
    """Returns the ``host:port`` at which a socket listens."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class EmbeddedServer(GuardedServer):
    """uvicorn without its signal handlers, because the process has its own handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def health_server(
    registry: CollectorRegistry,
    missing: Callable[[], list[str]],
    address: str,
    field: str,
    state: Callable[[], dict[str, str | None]] = dict,
    tasks: Tasks | None = None,
) -> Iterator[str]:
    """Serves the endpoints from a thread while the context is open. Yields the bound address (port 0 takes a free
    port).

    Args:
        tasks: the tasks of the process.

    Raises:
        InvalidConfig: the address is not available. The error names the key `field`.
    """
    app: Any = Starlette(routes=health_routes(registry, missing, state))
    listener = listen(address, field)
    server = EmbeddedServer(
        uvicorn.Config(
            app, lifespan="off", timeout_graceful_shutdown=1, **guarded(ConnectionLimits(256), lambda _: None)
        )
    )
    thread = (tasks or Tasks()).thread("health-http", lambda: server.run(sockets=[listener]))
    try:
        yield bound_address(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
