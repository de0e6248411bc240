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

from prometheus_client import CollectorRegistry
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
from edgewater.base.errors import StorageError
from edgewater.runtime.allocator import take_less_memory
from edgewater.runtime.clock import now_ms
from edgewater.runtime.configuration import is_loopback
from edgewater.runtime.health import bound_address, health_server, listen
from edgewater.runtime.tasks import Tasks, within_limit

if TYPE_CHECKING:  # imported when a component runs: the API must not load Spark, nor the gateway
    from center.catalog import Catalog, Component, ComponentRegistry, HeartbeatThread
    from center.storage.wake import Channel

log = logging.getLogger(__name__)

GATEWAY_SWITCH_S = 0.001  # limit: how long a thread keeps the interpreter
OPENING_S = 60.0  # limit: time of a start without a database
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


@contextlib.contextmanager
def _metrics(
    registry: CollectorRegistry, problems: Callable[[], list[str]], address: str | None, field: str, **kwargs: Any
) -> Iterator[None]:
    """Serves /livez, /readyz and /metrics, if the configuration has an address for them."""
    if address is None:
        yield
        return
    with health_server(registry, problems, address, field, **kwargs) as served:
        log.info("metrics are served at http://%s/metrics", served)
        yield


def _stop_at_signal() -> threading.Event:
    """Returns an event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def run_api(config: CenterConfig) -> None:
    """Serves the REST API until SIGTERM or SIGINT."""
    from center.api import create_app
    from center.api.routers.health import missing_components
    from center.api.server import ApiServer, server_config
    from center.catalog import Catalog, ComponentRegistry
    from center.results import ResultStore
    from center.storage.wake import Topic, Waker, channel_of

    config.api.require_credentials()
    take_less_memory()
    # uvicorn stops at a signal, and then raises the signal again for the handlers that were installed before: these.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
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
        ready = functools.partial(missing_components, services)
        stack.enter_context(_metrics(services.metrics.registry, ready, api.metrics, "api.metrics", tasks=tasks))
        address = bound_address(listener)
        stack.enter_context(_heartbeat(config, "api", tasks.missing, registry, address=address, tasks=tasks))
        log.info("the API is served at %s://%s", api.scheme, address)
        server.run(sockets=[listener])
    tasks.exit_if_failed()


def run_gateway(config: CenterConfig) -> None:
    """Serves edges until SIGTERM or SIGINT."""
    from center.catalog import Catalog
    from center.storage.wake import Topic, Waker, channel_of

    take_less_memory()
    # The event loop waits for the threads that check frames. While one edge sent 100 frames/s of 4,000 partials,
    # another edge's ack took 41 ms at the 99th percentile. With Python's default of 5 ms, it took 258 ms. The frames/s
    # were the same.
    sys.setswitchinterval(GATEWAY_SWITCH_S)
    # The catalog is opened before the event loop runs. Until then, a signal ends the process.
    wakes = channel_of(config.catalog_url)
    catalog = opened(lambda: Catalog(config.catalog_url, config.columns, Waker(wakes, Topic.CATALOG).wake))
    asyncio.run(_gateway(config, catalog, wakes))


def _relax_collection() -> None:
    """Makes garbage collection rare.

    A session consists of 200 objects that live as long as the session. With Python's thresholds and 2,200 sessions, a
    quarter of the event loop's time was spent on scanning these objects repeatedly.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def _gateway(config: CenterConfig, catalog: Catalog, wakes: Channel) -> None:
    from center.ingest.gateway import Gateway
    from center.storage.frame_log import FrameLog

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gateway = Gateway(catalog, FrameLog(config.log_dir), config, now_ms, wakes)
    loop = asyncio.get_running_loop()
    gateway.tasks.end = within_limit(lambda: loop.call_soon_threadsafe(stop.set))
    port = await gateway.start(config.gateway.listen)
    _relax_collection()
    host = config.gateway.listen.rpartition(":")[0]
    log.info("edges connect to %s:%d", host, port)
    try:
        with contextlib.ExitStack() as stack:
            registry, readiness = gateway.metrics.registry, gateway.readiness
            stack.enter_context(
                _metrics(registry, readiness, config.gateway.metrics, "gateway.metrics", tasks=gateway.tasks)
            )
            stack.enter_context(_heartbeat(config, "gateway", readiness, address=f"{host}:{port}", tasks=gateway.tasks))
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

    take_less_memory()
    stop = _stop_at_signal()
    tasks = Tasks(within_limit(stop.set))
    job = opened(lambda: Job(config, tasks), stop)
    with contextlib.ExitStack() as stack:
        if config.retention.answers_ms is not None:
            store = opened(lambda: ResultStore(config.results_url), stop)
            stack.callback(store.close)
            sinks = opened(lambda: SinkStore(store.engine), stop)
            catalog = opened(lambda: Catalog(config.catalog_url), stop)
            stack.callback(catalog.close)
            stack.enter_context(
                trimming(
                    store,
                    config.retention.answers_ms,
                    now_ms,
                    wait_ms=config.retention.sinks_ms,
                    awaited=sinks.lowest_answer,
                    expired=catalog.queries.expire,
                    tasks=tasks,
                )
            )
        registry, spark = job.metrics.registry, config.spark
        stack.enter_context(
            _metrics(registry, job.problems, spark.metrics, "spark.metrics", state=job.state, tasks=tasks)
        )
        needed = spark.drivers
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

    take_less_memory()
    configured = read_definitions(config.sinks)
    stop = _stop_at_signal()
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
    with _metrics(process.registry, process.problems, config.sink.metrics, "sink.metrics", tasks=process.tasks):
        process.run(stop)
    process.tasks.exit_if_failed()
