"""One run: some ways at the same time, each site of each way behind a link of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare import links, score
from bench.compare.edgewater_way import EdgewaterWay
from bench.compare.links import Links, LinkSettings
from bench.compare.processes import Processes
from bench.compare.script_way import ScriptWay
from bench.compare.ways import Way
from bench.compare.workload import Workload

START_S = 6.0
"""The sites start this long before the first record is due."""
MEMORY_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run.

    Attributes:
        speed: ms of event time in a ms of wall time.
        limit_s: the run ends this long after the end of the last window, complete or not.
        outage: from and to, in seconds after the first record; None: the links are never cut.
        flink_python: an interpreter that has apache-flink.
    """

    link: LinkSettings
    speed: float
    limit_s: float
    outage: tuple[float, float] | None = None
    flink_python: str = "python"


@dataclass
class _Running:
    way: Way
    subject: EdgewaterWay | ScriptWay
    processes: Processes
    cpu_before_s: tuple[float, float] = (0.0, 0.0)
    figures: dict[str, Any] | None = None


def run(ways: Sequence[Way], load: Workload, settings: RunSettings, directory: Path) -> list[dict[str, Any]]:
    """Runs the ways at the same time; returns a row of figures for each."""
    started: list[_Running] = []
    replay: dict[str, Any] = {
        "start_ms": load.start_ms,
        "window_ms": load.window_ms,
        "windows": load.windows,
        "speed": settings.speed,
        "begin_s": 0.0,
    }
    for way in ways:
        folder, processes = directory / way.name, Processes()
        folder.mkdir(parents=True)
        rate = settings.link.rate_bytes_s
        subject = (
            EdgewaterWay(way, load, folder, processes)
            if way.kind == "edgewater"
            else ScriptWay(way, load, folder, processes, rate, dict(replay), settings.flink_python)
        )
        started.append(_Running(way, subject, processes))
    ports = {(r.way.name, site): r.subject.gateway_port for r in started for site in range(len(load.files))}
    try:
        with links.running(settings.link, ports, directory / "links.log") as running:
            for each in started:
                each.subject.start_center()
            replay["begin_s"] = float(int(time.time() + START_S))  # noqa: TID251
            for each in started:
                each.subject.start_sites(running, replay)
            _follow(started, load, settings, replay["begin_s"], running)
            return [_row(each, load, settings, replay["begin_s"]) for each in started]
    finally:
        for each in started:
            each.processes.stop()


def _follow(started: Sequence[_Running], load: Workload, settings: RunSettings, begin_s: float, running: Links) -> None:
    """Waits until all ways are complete or the time is up. Notes the costs of each way when it is complete."""
    time.sleep(max(begin_s - time.time(), 0.0))  # noqa: TID251
    for each in started:
        each.cpu_before_s = each.processes.cpu_s("site"), each.processes.cpu_s("center")
    duration_s = load.windows * load.window_ms / 1000 / settings.speed
    end_s, memory_s, is_cut = begin_s + duration_s + settings.limit_s, begin_s, False
    while (now_s := time.time()) < end_s and any(each.figures is None for each in started):  # noqa: TID251
        if settings.outage is not None and is_cut != (settings.outage[0] <= now_s - begin_s < settings.outage[1]):
            is_cut = not is_cut
            running.set_cut(is_cut)
        if now_s >= memory_s:
            memory_s = now_s + MEMORY_EVERY_S
            for each in started:
                each.processes.measure_memory()
        for each in started if now_s > begin_s + duration_s else ():
            if each.figures is None and each.subject.is_complete():
                each.figures = _costs(each, running)
        time.sleep(0.5)
    for each in started:
        each.figures = each.figures or _costs(each, running)


def _costs(each: _Running, running: Links) -> dict[str, Any]:
    site_s, center_s = each.cpu_before_s
    return {
        "bytes": running.counts()[each.way.name],
        "cpu_sites_s": round(each.processes.cpu_s("site") - site_s, 2),
        "cpu_center_s": round(each.processes.cpu_s("center") - center_s, 2),
        "rss_site_mib": round(each.processes.rss_bytes["site"] / (1 << 20), 1),
        "rss_center_mib": round(each.processes.rss_bytes["center"] / (1 << 20), 1),
        "ended": each.processes.ended(),
    }


def _row(each: _Running, load: Workload, settings: RunSettings, begin_s: float) -> dict[str, Any]:
    window_s = load.window_ms / 1000 / settings.speed
    ends = [begin_s + (number + 1) * window_s for number in range(load.windows)]
    answers = each.subject.answers()
    rate = settings.link.rate_bytes_s
    return {
        "way": each.way.name,
        "kib_s": None if rate is None else rate / 1024,
        **score.row(each.way, load, answers, ends),
        "best_error": score.best_that_fits(load, _capacity_bytes(each.way, rate, window_s)),
        **(each.figures or {}),
        "statements": each.way.statements,
        "forecast": each.subject.forecast() if isinstance(each.subject, EdgewaterWay) else "",
    }


def _capacity_bytes(way: Way, rate_bytes_s: float | None, window_s: float) -> float | None:
    """Returns how many bytes a link carries from the begin of a window to the deadline of the way.

    None: the link or the way has no limit, or the way promises an error too.
    """
    if rate_bytes_s is None or way.deadline_s is None or way.error_share is not None:
        return None
    return rate_bytes_s * (window_s + way.deadline_s)
