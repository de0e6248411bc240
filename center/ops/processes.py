"""The parts of a center as processes: each opens the stores, beats, and works until told to stop.

The only place where parts meet the real clock and signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from center.config import CenterConfig, split_address
from edgewater.errors import InvalidConfig

if TYPE_CHECKING:  # what a part needs is imported when it runs: the API must not load Spark, nor the gateway
    import uvicorn

    from center.catalog import Component, HeartbeatThread
    from center.ingest.config import GatewayConfig
    from center.job.job import JobConfig

log = logging.getLogger(__name__)

GRACE_S = 5
"""How long open requests may take once the API is told to stop."""


def now_ms() -> int:
    return int(time.time() * 1000)  # noqa: TID251


def instance() -> str:
    """This process' name among the parts: ``host:pid``."""
    return f"{socket.gethostname()}:{os.getpid()}"


def listen(address: str, field: str) -> socket.socket:
    """A listening TCP socket. Raises InvalidConfig, naming the key, if the address cannot be had."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as exc:
        raise InvalidConfig(field, address, "an address that is free on this machine", exc.strerror or "") from exc


def bound(listener: socket.socket) -> str:
    """The ``host:port`` that a socket really listens on."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def _beating(config: CenterConfig, component: Component, **kwargs: Any) -> Iterator[HeartbeatThread]:
    from center.catalog import ComponentRegistry, HeartbeatThread

    registry = ComponentRegistry(config.catalog)
    try:
        with HeartbeatThread(registry, component, instance(), now_ms=now_ms, **kwargs) as beating:
            yield beating
    finally:
        registry.close()


def run_api(config: CenterConfig) -> None:
    """Serves the REST API until SIGTERM or SIGINT."""
    import uvicorn

    from center.api import create_app
    from center.catalog import Catalog, ComponentRegistry
    from center.results import ResultStore

    # uvicorn stops at a signal and then raises it once more, for whoever waits behind it: that is us.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    listener = listen(config.api.listen, "api.listen")
    app = create_app(
        Catalog(config.catalog),
        ResultStore(config.results),
        ComponentRegistry(config.catalog),
        config.api,
        now_ms=now_ms,
    )
    server = uvicorn.Server(_http(app))
    with _beating(config, "api", address=bound(listener)):
        log.info("the API answers at http://%s", bound(listener))
        server.run(sockets=[listener])


def run_gateway(config: CenterConfig) -> None:
    """Serves edges until SIGTERM or SIGINT."""
    asyncio.run(_gateway(config))


async def _gateway(config: CenterConfig) -> None:
    from center.catalog import Catalog
    from center.ingest.gateway import Gateway
    from center.storage.frame_log import FrameLog

    stop = _stop_at_signals()
    gateway = Gateway(Catalog(config.catalog), FrameLog(config.frames_dir), gateway_config(config), now_ms)
    port = await gateway.start(config.gateway.listen)
    host = config.gateway.listen.rpartition(":")[0]
    log.info("edges connect to %s:%d", host, port)
    try:
        async with _observed(gateway, config.gateway.metrics):
            with _beating(config, "gateway", address=f"{host}:{port}", problem=lambda: "; ".join(gateway.readiness())):
                await stop.wait()
    finally:
        await gateway.stop()


@contextlib.asynccontextmanager
async def _observed(gateway: Any, address: str | None) -> AsyncIterator[None]:
    """Serves the gateway's ``/metrics`` and ``/readyz``, if an address is configured."""
    if address is None:
        yield
        return
    import uvicorn

    from center.ingest.http import observe

    class Guest(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are the gateway's

    listener = listen(address, "gateway.metrics")
    server = Guest(_http(observe(gateway)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    log.info("the gateway's metrics are at http://%s/metrics", bound(listener))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def run_job(config: CenterConfig) -> None:
    """Merges and answers until SIGTERM or SIGINT."""
    from center.job.job import Job
    from center.results import ResultStore, trimming

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    job = Job(job_config(config))
    with contextlib.ExitStack() as stack:
        if config.retention.answers is not None:
            store = ResultStore(config.results)
            stack.callback(store.close)
            stack.enter_context(trimming(store, config.retention.answers, now_ms))
        stack.enter_context(_beating(config, "job", problem=job.problem))
        job.run(stop)


def gateway_config(config: CenterConfig) -> GatewayConfig:
    """The gateway's part of a configuration. Raises InvalidConfig for an unreadable tokens file."""
    from center.ingest.config import GatewayConfig

    return GatewayConfig(
        tokens=config.edge_tokens(),
        tls=config.tls,
        max_frame_bytes=config.gateway.max_frame,
        credit_bytes=config.gateway.credit,
    )


def job_config(config: CenterConfig) -> JobConfig:
    """The job's part of a configuration."""
    from center.job.job import JobConfig
    from center.spark.session import SessionConfig

    return JobConfig(
        catalog_url=config.catalog,
        results_url=config.results,
        log_dir=config.frames_dir,
        work_dir=config.spark_dir,
        session=SessionConfig(
            master=config.spark.master, driver_memory=config.spark.driver_memory, settings=config.spark.conf
        ),
        trigger_ms=config.spark.trigger,
        keep_frames_ms=config.retention.frames,
        metrics=split_address(config.spark.metrics) if config.spark.metrics else None,
        clock=now_ms,
    )


def _http(app: Any) -> uvicorn.Config:
    import uvicorn

    # It tells of every start and stop in four lines under the name of an error.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=GRACE_S
    )


def _stop_at_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
