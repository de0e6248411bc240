"""`python -m bench.first_light`: all measurements of this package, as a table and in bench/out/first_light.json."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from bench.first_light import center_rates, edge_rates
from bench.first_light.edge_rates import BATCH_ROWS
from bench.outcome import OUT, store_result

EDGE_VENV = Path("build/edge-venv")


@click.command()
@click.option("--only", type=click.Choice(["edge", "memory", "center"]), help="Part to run.  [default: all]")
@click.option("--seconds", default=30.0, show_default=True, help="Length of the steady measurement.")
@click.option(
    "--smoke", is_flag=True, help="Check that the bench runs: half a minute, few records, no virtual environment."
)
def main(only: str | None, seconds: float, smoke: bool) -> None:
    """Measure one edge and one center."""
    result: dict[str, Any] = {}
    if only in (None, "edge"):
        result["edge"] = _on_one_core(BATCH_ROWS if smoke else 20 * BATCH_ROWS)
    if only in (None, "memory"):
        result["memory"] = _memory(sys.executable, 1_000) if smoke else _memory(_edge_python(), 100_000)
    if only in (None, "center"):
        result["center"] = _center(2.0 if smoke else seconds)
    click.echo(store_result(OUT / "first_light.json", result))


def _on_one_core(records: int) -> dict[str, Any]:
    """Runs a measurement in a separate process, pinned to one core."""
    command = [sys.executable, "-c", f"from bench.first_light.__main__ import edge_child; edge_child({records})"]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def edge_child(records: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(edge_rates.measure(Path(directory), records)))


def _edge_python() -> str:
    """Returns the size of a virtual environment with the dependencies of an edge only."""
    python = EDGE_VENV / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(EDGE_VENV)], check=True)
        for what in (["--require-hashes", "-r", "requirements/edge.txt"], ["--no-deps", "--no-build-isolation", "."]):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *what], check=True)
    return str(python)


def _memory(python: str, groups: int) -> dict[str, Any]:
    program = (
        "from edgewater.runtime.allocator import *; use_system_allocator();"
        "import edge.agent, json; from bench.first_light.edge_rates import *; before = resident_mib();"
        f"at = memory_at({groups}); release_free_memory();"
        "print(json.dumps({'idle_mib': before, **at, 'given_back_mib': resident_mib()}))"
    )
    done = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _center(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        demo, ready_s = center_rates.start(Path(directory))
        try:
            # The first answers take longer, while the JVM loads and compiles its classes.
            asyncio.run(center_rates.steady(demo, 20, min(seconds, 10)))
            return {"ready_s": ready_s, "steady": asyncio.run(center_rates.steady(demo, 20, seconds))}
        finally:
            demo.stop()


if __name__ == "__main__":
    main()
