"""The part of `edgewater center run` outside of the supervisor: the commands that start components, and the report of
readiness.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click

from center.catalog import COMPONENTS, Component, ComponentHeartbeat, ComponentRegistry, component_status
from center.config import CenterConfig
from center.ops.supervisor import ComponentCommand, Supervisor
from center.ops.watchdog import HangWatch
from edgewater.base.errors import StorageError
from edgewater.runtime.clock import now_ms
from edgewater.runtime.configuration import split_address
from edgewater.runtime.tasks import Tasks

POLL_S = 0.2  # limit: processor time while waiting
STANDBY = "standby"
"""The standby's name in the log and in the directory of process ids. Each driver, including the standby, may lead."""
MISSING_LOG_INTERVAL_S = 30.0  # limit: size of the log

log = logging.getLogger(__name__)


class Startup:
    """Starts the components of a center, and reports when all components are ready.

    Args:
        flags: the configuration's flags that `run` received. They are passed on to the components. The configuration
            itself is not passed on, because secrets of the environment would be on a command line or on disk.
        as_json: whether readiness is printed as a line of JSON.
    """

    def __init__(self, config: CenterConfig, flags: Sequence[str], *, as_json: bool) -> None:
        self._config = config
        self._flags = tuple(flags)
        self._as_json = as_json
        self._addresses: dict[str, str] = {}
        self._began_s = time.monotonic()

    def commands(self) -> list[ComponentCommand]:
        commands = [
            ComponentCommand(c, functools.partial(self._argv, c), self._watch() if c == "job" else None)
            for c in COMPONENTS
        ]
        commands.append(ComponentCommand("sink", functools.partial(self._argv, "sink")))
        for number, name in enumerate(self._more_drivers(), 1):
            commands.append(ComponentCommand(name, functools.partial(self._driver_argv, number), self._watch()))
        return commands

    def _more_drivers(self) -> list[str]:
        """Returns the names of all drivers except the first driver, which is the component `job`."""
        spark = self._config.spark
        return [f"job-{number}" for number in range(2, spark.drivers + 1)] + [STANDBY] * spark.standby

    def _watch(self) -> Callable[[int], str]:
        hang_s = self._config.spark.hang_ms / 1000
        return HangWatch(self._config.progress_dir, hang_s, monotonic=time.monotonic).check

    def _driver_argv(self, number: int) -> list[str]:
        argv = self._argv("job")
        if self._config.spark.metrics is not None:
            host, _, port = self._config.spark.metrics.rpartition(":")
            argv += ["--set", f"spark.metrics={host}:{int(port) + number if int(port) else 0}"]
        return argv

    def _argv(self, component: Component | Literal["sink"]) -> list[str]:
        argv = [sys.executable, "-P", "-m", "edgewater", "center", component, "--supervised", *self._flags]
        configured = {"gateway": self._config.gateway.listen, "api": self._config.api.listen}.get(component)
        if configured is not None and split_address(configured)[1] == 0 and component in self._addresses:
            # The first start takes any free port. A restart must take the same port, or clients would not find it.
            argv += ["--set", f"{component}.listen={self._addresses[component]}"]
        return argv

    async def run(self, supervisor: Supervisor) -> None:
        """Runs the components until SIGTERM or SIGINT."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        registry = ComponentRegistry(self._config.catalog_url)
        tasks = Tasks(stop.set)
        tasks.start("report-when-ready", self._report_when_ready(registry, supervisor))
        try:
            await supervisor.run(stop)
        finally:
            await tasks.cancel()
            registry.close()
        tasks.exit_if_failed()

    async def _report_when_ready(self, registry: ComponentRegistry, supervisor: Supervisor) -> None:
        logged_s = self._began_s
        while missing := await self._missing(registry, supervisor):
            if time.monotonic() - logged_s >= MISSING_LOG_INTERVAL_S:
                logged_s = time.monotonic()
                log.warning("not ready after %.0f s: %s", logged_s - self._began_s, "; ".join(missing))
            await asyncio.sleep(POLL_S)
        self._print_ready(supervisor, time.monotonic() - self._began_s)

    async def _missing(self, registry: ComponentRegistry, supervisor: Supervisor) -> list[str]:
        try:
            heartbeats = await asyncio.to_thread(registry.heartbeats)
        except StorageError as exc:
            return [exc.message]
        # Heartbeats of an earlier run do not count.
        running: dict[str, set[int | None]] = {c: {supervisor.pids.get(c)} for c in COMPONENTS}
        running["job"].update(supervisor.pids.get(name) for name in self._more_drivers())
        current = [h for h in heartbeats if _pid(h) in running[h.component]]
        self._addresses.update({h.component: h.address for h in current if h.address})
        statuses = [component_status(component, current, now_ms()) for component in COMPONENTS]
        return [f"{s.component}: {s.reason}" for s in statuses if not s.ready]

    def _print_ready(self, supervisor: Supervisor, took_s: float) -> None:
        gateway, api = self._addresses["gateway"], f"{self._config.api.scheme}://{self._addresses['api']}"
        if self._as_json:
            ready: dict[str, Any] = {"ready": True, "gateway": gateway, "api": api, "pids": dict(supervisor.pids)}
            click.echo(json.dumps(ready))
        else:
            click.echo(
                f"The center is ready ({took_s:.1f} s).\n"
                f"  edges connect to   {gateway}\n"
                f"  queries            {api}/v1/queries\n"
                f"  console            {api}/ui/\n"
                f"  API documentation  {api}/docs\n"
                f"  state is in        {self._config.data_dir.resolve()}"
            )
        sys.stdout.flush()


def _pid(heartbeat: ComponentHeartbeat) -> int:
    return int(heartbeat.instance.rpartition(":")[2])
