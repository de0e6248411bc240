"""The components of a center as processes. Each opens the stores, sends heartbeats and works until a signal stops it.

Among the modules of the center's components, only this module uses the real clock and signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_random_exponential,
)

from center.config import CenterConfig
from edgewater.model.errors import StorageError
from edgewater.runtime.allocator import return_large_blocks
from edgewater.runtime.clock import now_ms
from edgewater.runtime.configuration import is_loopback
from edgewater.runtime.health import bound_address, health_server, listen
from edgewater.runtime.tasks import Tasks, within_limit

if TYPE_CHECKING:  # imported when a component runs: the API must not load Spark, nor the gateway
    from center.catalog import Catalog, Component, ComponentRegistry, HeartbeatThread
    from center.ingest.gateway import GatewayConfig
    from center.job.job import JobConfig

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
GATEWAY_SWITCH_S = 0.001
OPENING_S = 60.0
"""The longest time in seconds for which a starting component tries to open a database that it cannot reach."""


def instance_name() -> str:
    """Returns this process' name in the component registry: ``host:pid``."""
    return f"{socket.gethostname()}:{os.getpid()}"


Store = TypeVar("Store")


def opened(open_store: Callable[[], Store], stop: threading.Event | None = None) -> Store:
    """Opens a store that needs a database. Tries again while the database cannot be reached.

    Args:
        open_store: opens the store.
        stop: ends the attempts when it is set.

    Raises:
        StorageError: the database could not be reached for `OPENING_S`, or cannot be used for another reason.
    """

    def failed(attempt: RetryCallState) -> None:
        log.warning("%s; trying again", attempt.outcome.exception() if attempt.outcome else "")

    pause = sleep_using_event(stop) if stop is not None else time.sleep
    ended: Any = stop_after_delay(OPENING_S)
    return Retrying(
        retry=retry_if_exception(_is_unreachable),
        wait=wait_random_exponential(multiplier=0.2, max=5),
        stop=ended if stop is None else ended | stop_when_event_set(stop),
        sleep=pause,
        before_sleep=failed,
        reraise=True,
    )(open_store)


def _is_unreachable(exc: BaseException) -> bool:
    # PEP 249 defines the name of the class. SQLAlchemy wraps most errors of drivers, but not all.
    return isinstance(exc, StorageError) and any(c.__name__ == "OperationalError" for c in type(exc.__cause__).__mro__)


@contextlib.contextmanager
def _heartbeat(
    config: CenterConfig,
    component: Component,
    problems: Callable[[], list[str]],
    registry: ComponentRegistry | None = None,
    **kwargs: Any,
) -> Iterator[HeartbeatThread]:
    from center.catalog import ComponentRegistry, HeartbeatThread

    registry = registry or opened(lambda: ComponentRegistry(config.catalog_url))
    try:
        kwargs["problem"] = lambda: "; ".join(problems())
        with HeartbeatThread(registry, component, instance_name(), now_ms=now_ms, **kwargs) as thread:
            yield thread
    finally:
        registry.close()


def run_api(config: CenterConfig) -> None:
    """Serves the REST API until SIGTERM or SIGINT."""
    from center.api import create_app
    from center.api.routers.health import missing_components
    from center.api.server import ApiServer, server_config
    from center.catalog import Catalog, ComponentRegistry
    from center.results import ResultStore
    from center.storage.wake import Topic, Waker, channel_of

    config.api.require_credentials()
    return_large_blocks()
    # uvicorn stops at a signal, and then raises the signal again for the handlers that were installed before: these.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    # Workers take the interpreter's lock ten times per request. With Python's default they would wait 5 ms each time
    # while the event loop is busy.
    sys.setswitchinterval(SWITCH_S)
    listener = listen(config.api.listen, "api.listen")
    registry = opened(lambda: ComponentRegistry(config.catalog_url))
    wakes = channel_of(config.catalog_url)
    app = create_app(
        opened(lambda: Catalog(config.catalog_url, config.columns, Waker(wakes, Topic.CATALOG).wake)),
        opened(lambda: ResultStore(config.results_url)),
        registry,
        config.api,
        now_ms=now_ms,
        sink_secrets=config.sink.secrets,
        wakes=wakes,
    )
    services, api = app.state.services, config.api
    tasks = services.tasks
    config_of_server = server_config(app, api, services.metrics.on_refused)
    server = ApiServer(config_of_server, api, services.feed.changes.end, tasks=tasks)
    tasks.end = within_limit(lambda: setattr(server, "should_exit", True))
    if api.authenticates and api.tls is None and not is_loopback(api.listen):
        log.warning("tokens are sent over the network without encryption: set api.tls, or use a proxy with TLS")
    with contextlib.ExitStack() as stack:
        if api.metrics is not None:
            ready = functools.partial(missing_components, services)
            health = health_server(services.metrics.registry, ready, api.metrics, "api.metrics", tasks=tasks)
            address = stack.enter_context(health)
            log.info("metrics are served at http://%s/metrics", address)
        address = bound_address(listener)
        stack.enter_context(_heartbeat(config, "api", tasks.missing, registry, address=address, tasks=tasks))
        log.info("the API is served at %s://%s", api.scheme, address)
        server.run(sockets=[listener])
    tasks.exit_if_failed()


def run_gateway(config: CenterConfig) -> None:
    """Serves edges until SIGTERM or SIGINT."""
    from center.catalog import Catalog
    from center.storage.wake import Topic, Waker

    return_large_blocks()
    # The event loop waits for the threads that check frames. While one edge sent 100 frames/s of 4,000 partials,
    # another edge's ack took 41 ms at the 99th percentile. With Python's default of 5 ms, it took 258 ms. The frames/s
    # were the same.
    sys.setswitchinterval(GATEWAY_SWITCH_S)
    # The catalog is opened before the event loop runs. Until then, a signal ends the process.
    gateway = gateway_config(config)
    changed = Waker(gateway.wakes, Topic.CATALOG).wake
    catalog = opened(lambda: Catalog(config.catalog_url, config.columns, changed))
    asyncio.run(_gateway(config, gateway, catalog))


def _relax_collection() -> None:
    """Makes garbage collection rare.

    A session consists of 200 objects that live as long as the session. With Python's thresholds and 2,200 sessions, a
    quarter of the event loop's time was spent on scanning these objects repeatedly.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def _gateway(config: CenterConfig, limits: GatewayConfig, catalog: Catalog) -> None:
    from center.ingest.gateway import Gateway
    from center.storage.frame_log import FrameLog

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gateway = Gateway(catalog, FrameLog(config.log_dir), limits, now_ms)
    loop = asyncio.get_running_loop()
    gateway.tasks.end = within_limit(lambda: loop.call_soon_threadsafe(stop.set))
    port = await gateway.start(config.gateway.listen)
    _relax_collection()
    host = config.gateway.listen.rpartition(":")[0]
    log.info("edges connect to %s:%d", host, port)
    try:
        with contextlib.ExitStack() as stack:
            if config.gateway.metrics is not None:
                address = stack.enter_context(
                    health_server(
                        gateway.metrics.registry,
                        gateway.readiness,
                        config.gateway.metrics,
                        "gateway.metrics",
                        tasks=gateway.tasks,
                    )
                )
                log.info("metrics are served at http://%s/metrics", address)
            stack.enter_context(
                _heartbeat(config, "gateway", gateway.readiness, address=f"{host}:{port}", tasks=gateway.tasks)
            )
            await stop.wait()
    finally:
        await gateway.stop()
    gateway.tasks.exit_if_failed()


def run_job(config: CenterConfig) -> None:
    """Merges frames and answers queries until SIGTERM or SIGINT."""
    from center.catalog import Catalog
    from center.job.job import Job
    from center.results import ResultStore, trimming
    from center.sinks import SinkStore

    return_large_blocks()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    tasks = Tasks(within_limit(stop.set))
    job = opened(lambda: Job(job_config(config), tasks), stop)
    with contextlib.ExitStack() as stack:
        if config.retention.keep_answers_ms is not None:
            store = opened(lambda: ResultStore(config.results_url), stop)
            stack.callback(store.close)
            sinks = opened(lambda: SinkStore(store.engine), stop)
            catalog = opened(lambda: Catalog(config.catalog_url), stop)
            stack.callback(catalog.close)
            stack.enter_context(
                trimming(
                    store,
                    config.retention.keep_answers_ms,
                    now_ms,
                    wait_ms=config.retention.wait_for_sinks_ms,
                    awaited=sinks.lowest_answer,
                    expired=catalog.queries.expire,
                    tasks=tasks,
                )
            )
        needed = config.spark.drivers
        stack.enter_context(_heartbeat(config, "job", job.problems, role=lambda: job.role, needed=needed, tasks=tasks))
        job.run(stop)
    tasks.exit_if_failed()


def run_sinks(config: CenterConfig) -> None:
    """Writes answers to the sinks until SIGTERM or SIGINT."""
    from center.catalog import Catalog
    from center.results import ResultStore
    from center.sinks import SinkStore
    from center.sinks.definitions import read_definitions
    from center.sinks.process import SinkProcess

    return_large_blocks()
    configured = read_definitions(config.sinks)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    results = opened(lambda: ResultStore(config.results_url), stop)
    process = SinkProcess(
        configured,
        opened(lambda: Catalog(config.catalog_url, config.columns), stop),
        results,
        opened(lambda: SinkStore(results.engine), stop),
        owner=instance_name(),
        now_ms=now_ms,
        listed=config.sink.secrets,
    )
    process.tasks.end = within_limit(stop.set)
    with contextlib.ExitStack() as stack:
        if config.sink.metrics is not None:
            health = health_server(
                process.registry, process.problems, config.sink.metrics, "sink.metrics", tasks=process.tasks
            )
            log.info("metrics are served at http://%s/metrics", stack.enter_context(health))
        process.run(stop)
    process.tasks.exit_if_failed()


def gateway_config(config: CenterConfig) -> GatewayConfig:
    """Returns the gateway's configuration."""
    from center.ingest.gateway import GatewayConfig
    from center.storage.wake import channel_of

    section = config.gateway
    return GatewayConfig(
        tokens=config.tokens,
        tokens_file=config.tokens_file,
        tls=config.tls,
        max_frame_bytes=section.max_frame_bytes,
        credit_bytes=section.credit_bytes,
        edge_heartbeat_ms=section.edge_heartbeat_ms,
        compression_bytes=section.compression_bytes,
        work_per_s=section.work_per_s,
        open_windows=section.open_windows,
        streams=config.streams,
        wakes=channel_of(config.catalog_url),
    )


def job_config(config: CenterConfig) -> JobConfig:
    """Returns the job's configuration."""
    from center.job.job import JobConfig
    from center.spark.spark_session import SessionConfig
    from center.storage.wake import channel_of

    spark = config.spark
    if spark.trigger_ms:
        log.warning("spark.trigger is without effect, and is not accepted by the next minor version: remove it")
    return JobConfig(
        catalog_url=config.catalog_url,
        results_url=config.results_url,
        log_dir=config.log_dir,
        work_dir=config.work_dir,
        progress_dir=config.progress_dir,
        session=SessionConfig(master=spark.master, driver_memory=spark.driver_memory, conf=spark.conf),
        wakes=channel_of(config.catalog_url),
        keep_frames_ms=config.retention.keep_frames_ms,
        metrics=spark.metrics,
        lease_ms=spark.lease_ms,
        drivers=spark.drivers,
        max_answer_bytes=spark.max_answer_bytes,
        clock=now_ms,
    )
