"""The processes of a center: their kinds, and the CPU time that each has used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from sim.demo.ports import free_address
from sim.demo.run import Demo

GATEWAY, JOB, API = "gateway", "job", "api"
METERED = "gateway", "spark"
"""Sections of the settings whose processes serve the metrics that a bench reads."""


def kind_of(process: psutil.Process) -> str:
    """Returns the part of a center that a process of its tree belongs to."""
    command = process.cmdline()
    if command and "java" in command[0]:
        return "jvm"
    if any("pyspark" in word or "center.spark" in word for word in command):
        return "python workers"
    return next((part for part in (GATEWAY, JOB, API) if part in command), "supervisor")


def center_processes(demo: Demo) -> Iterator[tuple[str, psutil.Process]]:
    """Yields the processes of a center with their kinds."""
    center = psutil.Process(demo.processes["center"].pid)
    for process in (center, *center.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            yield kind_of(process), process


class CpuMeter:
    """CPU seconds by kind of process since it was made. Processes that have ended meanwhile are missing."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._before = self._read()
        self._began_s = time.perf_counter()

    def _read(self) -> dict[tuple[int, str], float]:
        used: dict[tuple[int, str], float] = {}
        for kind, process in (("load generator", psutil.Process()), *center_processes(self._demo)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used[process.pid, kind] = times.user + times.system
        return used

    def seconds(self) -> dict[str, float]:
        """Returns the CPU seconds by kind, and ``wall``."""
        used: dict[str, float] = {}
        for (pid, kind), now_s in self._read().items():
            used[kind] = used.get(kind, 0.0) + now_s - self._before.get((pid, kind), 0.0)
        return {kind: round(s, 3) for kind, s in sorted(used.items())} | {
            "wall": round(time.perf_counter() - self._began_s, 3)
        }


def started(directory: Path, settings: dict[str, Any]) -> tuple[Demo, dict[str, float]]:
    """Starts a center with these settings. Returns it when it is ready, and the CPU seconds of its start by process."""
    demo, began_s = Demo(directory, 1.0, settings=settings), time.perf_counter()
    try:
        demo.start_center()
    except BaseException:
        demo.stop()
        raise
    wall_s = time.perf_counter() - began_s
    meter = CpuMeter(demo)
    meter._before = {}
    cpu = meter.seconds()
    del cpu["load generator"]
    return demo, cpu | {"wall": round(wall_s, 3)}


def metered(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a center whose gateway and job serve their metrics, for `counters`."""
    served = dict(settings)
    for section in METERED:
        served[section] = {**served.get(section, {}), "metrics": free_address()}
    return served


def counters(demo: Demo) -> dict[str, float]:
    """Returns the metrics without labels of gateway and job, by name."""
    found: dict[str, float] = {}
    for section in METERED:
        text = httpx.get(f"http://{demo.settings[section]['metrics']}/metrics").raise_for_status().text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        found |= {sample.name: sample.value for sample in samples if not sample.labels}
    return found


def job_readiness(demo: Demo) -> dict[str, Any]:
    """Returns the readiness of the job, as the API states it."""
    reply = httpx.get(f"{demo.url}/readyz").json()
    return dict(reply["components"].get("job", {}))


def leading_driver(demo: Demo) -> int:
    """Returns the id of the process that leads."""
    return int(job_readiness(demo)["leader"].rpartition(":")[2])
