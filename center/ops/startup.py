"""What `edgewater center run` does around the supervisor: how parts are started, and when all are ready."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from center.catalog import COMPONENTS, Component, ComponentHeartbeat, ComponentRegistry, component_status
from center.config import CenterConfig, split_address
from center.ops.processes import now_ms
from center.ops.supervisor import ComponentCommand, Supervisor
from edgewater.errors import StorageError

POLL_S = 0.2
SAY_MISSING_EVERY_S = 30.0

log = logging.getLogger(__name__)


class Startup:
    """Starts the parts of a center and tells when they are ready.

    Args:
        flags: the configuration's flags as `run` was given them; the parts get the same. Not the
            configuration itself: secrets of the environment would end on a command line or on disk.
        as_json: whether readiness is told as a line of JSON.
    """

    def __init__(self, config: CenterConfig, flags: Sequence[str], *, as_json: bool) -> None:
        self._config = config
        self._flags = tuple(flags)
        self._as_json = as_json
        self._addresses: dict[str, str] = {}

    def commands(self) -> list[ComponentCommand]:
        return [ComponentCommand(component, functools.partial(self._argv, component)) for component in COMPONENTS]

    def _argv(self, component: Component) -> list[str]:
        argv = [sys.executable, "-m", "edgewater", "center", component, "--supervised", *self._flags]
        configured = {"gateway": self._config.gateway.listen, "api": self._config.api.listen}.get(component)
        if configured is not None and split_address(configured)[1] == 0 and component in self._addresses:
            # Any port would do at first; after a restart only the same one, or nobody would find it.
            argv += ["--set", f"{component}.listen={self._addresses[component]}"]
        return argv

    async def run(self, supervisor: Supervisor) -> None:
        """Runs the parts until SIGTERM or SIGINT."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        registry = ComponentRegistry(self._config.catalog)
        telling = asyncio.create_task(self._tell_when_ready(registry, supervisor))
        try:
            await supervisor.run(stop)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            registry.close()

    async def _tell_when_ready(self, registry: ComponentRegistry, supervisor: Supervisor) -> None:
        began_s = said_s = time.monotonic()
        while True:
            missing = await self._missing(registry, supervisor)
            if not missing:
                break
            if time.monotonic() - said_s >= SAY_MISSING_EVERY_S:
                said_s = time.monotonic()
                log.warning("not ready after %.0f s: %s", said_s - began_s, "; ".join(missing))
            await asyncio.sleep(POLL_S)
        self._say(supervisor, time.monotonic() - began_s)

    async def _missing(self, registry: ComponentRegistry, supervisor: Supervisor) -> list[str]:
        try:
            beats = await asyncio.to_thread(registry.heartbeats)
        except StorageError as exc:
            return [exc.message]
        # Beats of an earlier run say nothing about this one.
        mine = [b for b in beats if _pid(b) == supervisor.pids.get(b.component)]
        self._addresses.update({b.component: b.address for b in mine if b.address})
        statuses = [component_status(component, mine, now_ms()) for component in COMPONENTS]
        return [f"{s.component}: {s.reason}" for s in statuses if not s.ready]

    def _say(self, supervisor: Supervisor, took_s: float) -> None:
        gateway, api = self._addresses["gateway"], f"http://{self._addresses['api']}"
        if self._as_json:
            ready: dict[str, Any] = {"ready": True, "gateway": gateway, "api": api, "pids": dict(supervisor.pids)}
            click.echo(json.dumps(ready))
        else:
            click.echo(
                f"The center is ready ({took_s:.1f} s).\n"
                f"  edges connect to   {gateway}\n"
                f"  ask at             {api}/v1/queries\n"
                f"  API documentation  {api}/docs\n"
                f"  state is in        {self._config.data_dir.resolve()}"
            )
        sys.stdout.flush()


def _pid(heartbeat: ComponentHeartbeat) -> int:
    return int(heartbeat.instance.rpartition(":")[2])
