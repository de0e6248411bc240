"""One and two executors of a Spark cluster merge the same prepared log: no gateway and no load generator runs.

The cluster is Spark's standalone master with workers of one core each, all on this machine. The driver runs on it too,
so on two cores the second executor competes with the driver. Two more rows avoid this: the kernel gives each executor a
share of a core (a quota of its control group), as on slow machines of their own, and the driver has the remaining CPU.
Beside each rate there is the CPU of each part.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pyspark
import yaml

from bench.first_light.center_rates import FIRST_MS, GROUPS_4KB, QUERIES
from bench.first_light.synthetic_edge import WINDOW_MS, SyntheticEdge, spec, synopsis
from bench.scale.sessions import start_gateway
from center.catalog import Catalog
from center.results import ResultStore
from center.spark.java import require_java
from edge.process import now_ms
from edgewater.model.query import QuerySpec
from sim.demo.ports import free_port

PARTIALS, WINDOWS = 32, 600
SETTLED = 0.7
"""The fraction of the frames after which the rate is measured. Each JVM compiles until then. This is as much work again
per executor, and not work of the frames."""
WITHIN_S = 240.0
DRIVER_MEMORY, EXECUTOR_MEMORY = "1g", "768m"
SHARE = 0.3
"""Share of a core of each executor, in the rows with slow executors. Two of them leave the driver more than it
needs.
"""
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
"""Directory of control groups (version 1) with a CPU quota. Writing there needs root."""


def measure(smoke: bool) -> dict[str, Any]:
    """Returns a row per number of executors, and the ratio of their rates."""
    require_java(os.environ)
    windows = 3 if smoke else WINDOWS
    with tempfile.TemporaryDirectory() as name:
        prepared = Path(name) / "prepared"
        prepared.mkdir()
        frames = asyncio.run(prepare(prepared, f"sqlite:///{prepared}/catalog.db", windows, QUERIES))
        rows = {}
        for share in (None, SHARE) if os.access(CPU_GROUPS, os.W_OK) else (None,):
            for executors in (1, 2):
                title = f"{executors} executors" + ("" if share is None else f" of {share} cores each")
                copy = Path(name) / title
                shutil.copytree(prepared, copy)
                rows[title] = _merge(copy, executors, frames, share)
    one, two, *slow = rows.values()
    return {
        "rows": rows,
        "wall_ratio": rate_ratio(one, two),
        "slow_executors_ratio": rate_ratio(*slow) if slow else f"not measured: {CPU_GROUPS} cannot be written",
        "executors_cpu_share": None
        if not one["partials_s"]
        else round(one["cpu_us_per_partial"]["executors"] / sum(one["cpu_us_per_partial"].values()), 2),
    }


def rate_ratio(one: dict[str, Any], two: dict[str, Any]) -> float | None:
    """Returns the ratio of the rates of two executors and one; None if either merged all partials in one batch."""
    return round(two["partials_s"] / one["partials_s"], 2) if one["partials_s"] and two["partials_s"] else None


async def prepare(directory: Path, catalog_url: str, windows: int, queries: int) -> int:
    """Ships the frames of all windows of these queries to a gateway. Returns their number."""
    catalog = Catalog(catalog_url)
    names = [f"x{i}" for i in range(queries)]
    for name in names:
        catalog.queries.register(QuerySpec.from_mapping(spec(name)), now_ms())
    catalog.close()
    port = free_port()
    gateway = start_gateway(directory, port, f"catalog_url={catalog_url}")
    edge = SyntheticEdge(f"127.0.0.1:{port}")
    uplink = asyncio.create_task(edge.uplink.run())
    try:
        async with asyncio.timeout(WITHIN_S):
            while set(names) - set(edge.queries):
                await asyncio.sleep(0.05)
            payloads = [synopsis(GROUPS_4KB, seed) for seed in range(8)]
            chosen = [payloads[i % 8] for i in range(PARTIALS)]
            for window in range(windows):
                for name in names:
                    edge.put(name, FIRST_MS + window * WINDOW_MS, chosen)
            while len(edge.acked_at) < windows * len(names):
                await asyncio.sleep(0.05)
    finally:
        uplink.cancel()
        await asyncio.gather(uplink, return_exceptions=True)
        gateway.terminate()
        gateway.wait()
    return windows * len(names)


def _merge(directory: Path, executors: int, frames: int, share: float | None) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        master, cluster = stack.enter_context(standalone_cluster(directory, executors))
        config = {"data_dir": str(directory), "spark": spark_settings(master, executors)}
        (directory / "center.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "edgewater", "center", "job", "-c", str(directory / "center.yaml")]
        job = stack.enter_context(running(command, directory / "job.log", "--log-level", "warning"))
        store = ResultStore(f"sqlite:///{directory}/results.db")
        stack.callback(store.close)
        began_s = time.monotonic()

        def consumed() -> int:
            if job.poll() is not None or time.monotonic() - began_s > WITHIN_S:
                raise RuntimeError(f"the job has ended or is late: {(directory / 'job.log').read_text()[-2_000:]}")
            time.sleep(0.02)
            return sum(store.consumed().values())

        while (first := consumed()) < SETTLED * frames:
            pass
        if share is not None:  # set now, because the slow start of a JVM is not measured
            for worker in cluster:
                stack.enter_context(limited(worker.pid, share))
            batch = first
            while (first := consumed()) == batch < frames:  # waits for the batch that began before
                pass
        before, at_s = _cpu(job, cluster), time.perf_counter()
        while (last := consumed()) < frames:
            pass
        took_s, used = time.perf_counter() - at_s, _cpu(job, cluster)
    return rate_row((last - first) * PARTIALS, took_s, {kind: used[kind] - before[kind] for kind in used})


def rate_row(partials: int, seconds: float, cpu_s: Mapping[str, float]) -> dict[str, Any]:
    """Returns the rate of these partials, and the CPU of each by kind of process."""
    if not partials:
        return {"partials_s": None, "partials": 0}  # all partials were in one batch
    return {
        "partials_s": round(partials / seconds, 1),
        "partials": partials,
        "seconds": round(seconds, 2),
        "cpu_us_per_partial": {kind: round(used_s / partials * 1e6, 1) for kind, used_s in cpu_s.items()},
    }


@contextlib.contextmanager
def limited(root: int, share: float) -> Iterator[None]:
    """Gives a process, its descendants and all that they start this share of a core."""
    group = CPU_GROUPS / f"edgewater-bench-{root}"
    group.mkdir()
    try:
        period_us = int((group / "cpu.cfs_period_us").read_text())
        (group / "cpu.cfs_quota_us").write_text(str(round(share * period_us)))
        process = psutil.Process(root)
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(each.pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (CPU_GROUPS / "cgroup.procs").write_text(pid)
        group.rmdir()


def spark_settings(master: str, executors: int) -> dict[str, Any]:
    """Returns the settings of a center whose job runs on the cluster."""
    return {
        "master": master,
        "driver_memory": DRIVER_MEMORY,
        "conf": {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.cores": "1",
            "spark.executor.memory": EXECUTOR_MEMORY,
            "spark.cores.max": str(executors),
            "spark.sql.shuffle.partitions": str(2 * executors),
        },
    }


@contextlib.contextmanager
def standalone_cluster(directory: Path, executors: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Yields the URL of a master, and its workers with one core each."""
    jars, port = Path(pyspark.__file__).parent / "jars", free_port()
    java = ["java", "-Xmx256m", "-cp", f"{jars}/*"]
    listen = ["--host", "127.0.0.1", "--port"]
    url = f"spark://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        command = [*java, "org.apache.spark.deploy.master.Master", *listen, str(port), "--webui-port", "0"]
        stack.enter_context(running(command, directory / "master.log"))
        _await_line(directory / "master.log", "I have been elected leader")
        workers = []
        for number in range(executors):
            work = directory / f"worker-{number}"
            command = [*java, "org.apache.spark.deploy.worker.Worker", *listen, "0", "--webui-port", "0"]
            command += ["--cores", "1", "--memory", "1g", "--work-dir", str(work), url]
            log = directory / f"worker-{number}.log"
            workers.append(stack.enter_context(running(command, log)))
            _await_line(log, "Successfully registered with master")
        yield url, workers


@contextlib.contextmanager
def running(command: list[str], log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        env = os.environ | {
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_SCALA_VERSION": "2.13",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        process = subprocess.Popen([*command, *arguments], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env)
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()


def _await_line(log: Path, text: str) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not re.search(re.escape(text), log.read_text(errors="replace")):
        if time.monotonic() > end_s:
            raise RuntimeError(f"{log.name}: {log.read_text(errors='replace')[-2_000:]}")
        time.sleep(0.05)


def cpu_of_tree(root: int) -> float:
    """Returns the CPU seconds of a process and its descendants."""
    total, process = 0.0, psutil.Process(root)
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def _cpu(job: subprocess.Popen[bytes], cluster: list[subprocess.Popen[bytes]]) -> dict[str, float]:
    """Returns the CPU seconds of the driver's processes, and of the executors' JVMs and Python workers."""
    return {"driver": cpu_of_tree(job.pid), "executors": sum(cpu_of_tree(worker.pid) for worker in cluster)}
