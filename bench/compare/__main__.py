"""`make compare`: Edgewater beside the usual ways, on real narrow links."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.compare import links, model, workload
from bench.compare.links import LinkSettings
from bench.compare.runs import RunSettings, run
from bench.compare.ways import WAYS, Way
from bench.data import DOWNLOADS_WEEK
from bench.outcome import OUT, store_result

WINDOW_MS = 6 * 3_600_000
SITES, WINDOWS, SPEED = 4, 12, 2_000.0
DELAY_S = 0.05
OUTAGE = (60.0, 90.0)
MAX_LOAD = 1.0
SMOKE_BUCKET_BYTES = 1_600
QUICK_WAYS = ("script-exact", "script-1%", "sample-10%", "error-1%-2s", "staleness-2s")
MODEL_WAYS = ("exact", "error-1%", "error-1%-2s", "staleness-2s")
HEADER = ("way", "KiB/s", "windows", "KB on the wire", "p50 s", "p95 s", "error %", "kept", "CPU sites", "CPU center",
          "site MiB", "forecast")  # fmt: skip


@click.command()
@click.argument("mode", type=click.Choice(["all", "quick", "model"]), default="all")
@click.option("--way", "names", multiple=True, type=click.Choice(list(WAYS)), help="Only these ways; may be repeated.")
@click.option("--kib", "rates", multiple=True, type=float, help="KiB/s of a link; 0: unlimited. Default: 4 16 64 0.")
@click.option("--delay", "delay_s", default=DELAY_S, show_default=True, help="Seconds in each direction of a link.")
@click.option(
    "--bucket",
    type=click.IntRange(min=1_514),
    help="Bytes of the kernel's token bucket before each link, such as 1600 or 65536. Needs root.",
)
@click.option("--late", "late_share", default=0.0, show_default=True, help="Share of records that arrive late.")
@click.option("--outage", is_flag=True, help="Cut all links from second 60 to 90.")
@click.option("--windows", default=WINDOWS, show_default=True)
@click.option("--speed", default=SPEED, show_default=True, help="Event time per wall time.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=DOWNLOADS_WEEK,
    show_default=True,
    help="Folder of daily CRAN logs. Without it, records are generated.",
)
@click.option("--flink", "flink_python", help="Python with apache-flink and zstandard. Without it Flink is left out.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep logs, configurations and answers in this folder.")
@click.option("--force", is_flag=True, help="Measure on a busy machine too.")
@click.option("--plots", type=click.Path(path_type=Path), help="Draw the rows into this folder, as SVG.")
@click.option(
    "--measured",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="With `model`: a file of measured rows (JSON), to print the ratio to.",
)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON.")
@click.option(
    "--smoke", is_flag=True, help="Check that the bench runs: two ways, three short windows, generated records."
)
def main(mode: str, names: tuple[str, ...], rates: tuple[float, ...], delay_s: float, bucket: int | None,
         late_share: float, outage: bool, windows: int, speed: float, data: Path, flink_python: str | None,
         keep: Path | None, force: bool, plots: Path | None, measured: tuple[Path, ...], as_json: bool,
         smoke: bool) -> None:  # fmt: skip
    """Compare bytes, latency, error, CPU and memory of Edgewater with scripts, samples, Flink and Spark.

    Each site of each way has a link of its own: as root in network namespaces, otherwise through a relay that limits
    the rate. Latency is the wall time from the end of a window to the moment at which a client can see its answer.
    Bytes are those of the link in both directions, with the headers of TCP and IP where namespaces are used.

    `model` runs nothing: it predicts the rows of Edgewater's ways by simulation on the same records.
    """
    limit_s = 120.0
    if smoke:
        names, rates, force = names or ("script-1%", "error-1%-2s"), (4.0,), True
        windows, speed, limit_s = 3, 6_000.0, 60.0
        bucket = SMOKE_BUCKET_BYTES if links.may_create_namespaces() else 0
    elif mode == "quick":
        names, rates, windows = names or QUICK_WAYS, rates or (4.0,), min(windows, 5)
    rates, bucket = rates or (4.0, 16.0, 64.0, 0.0), bucket or 0
    if mode == "model":
        predict(names or MODEL_WAYS, rates, delay_s, bucket, windows, speed, None if smoke else data, measured, as_json)
        return
    load_average = os.getloadavg()[0]
    if not force and load_average > MAX_LOAD:
        raise click.UsageError(
            f"the load of this machine is {load_average:.1f}, above {MAX_LOAD:g}: other work would change the figures. "
            "Wait until it has ended, or give --force"
        )
    if bucket or not smoke:
        links.enter_namespace(sys.argv[1:])
    if bucket and links.INSIDE not in os.environ:
        raise click.UsageError(f"--bucket {bucket} needs the right to create network namespaces: run as root")
    ways = [WAYS[name] for name in names or WAYS]
    if flink_python is None:
        ways = [way for way in ways if way.kind != "flink"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        load = _load(directory, data if not smoke else None, windows, 6_000 if smoke else 58_000, late_share)
        click.echo(f"{SITES} sites, {windows} windows of {WINDOW_MS / 1000 / speed:.1f} s, "
                   f"{sum(map(len, load.sums)) // windows:,} groups a window", err=True)  # fmt: skip
        for rate in rates:
            link = LinkSettings(rate * 1024 or None, delay_s, bucket)
            settings = RunSettings(link, speed, limit_s, OUTAGE if outage else None, flink_python or "")
            for group in _groups(ways):
                click.echo(f"running at {rate:g} KiB/s: {', '.join(way.name for way in group)}", err=True)
                rows += run(group, load, settings, directory / f"{rate:g}-{group[0].name}")
    text = store_result(OUT / "compare.json", rows)
    if plots is not None:
        from bench.compare.plots import draw  # matplotlib takes long to import

        plots.mkdir(parents=True, exist_ok=True)
        for path in draw(rows, plots):
            click.echo(f"drawn: {path}", err=True)
    click.echo(text if as_json else table(rows))


def predict(names: Sequence[str], rates: Sequence[float], delay_s: float, bucket: int, windows: int, speed: float,
            data: Path | None, measured: Sequence[Path], as_json: bool) -> None:  # fmt: skip
    """Prints the rows that the simulator predicts, beside measured ones."""
    known = [row for path in measured for row in json.loads(path.read_text())]
    ways = [WAYS[name] for name in names if WAYS[name].kind == "edgewater" and WAYS[name].function == "sum"]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        load = _load(Path(scratch), data, windows, 6_000 if data is None else 58_000, 0.0)
        records = model.read_trace(load)
        for rate in rates:
            link = LinkSettings(rate * 1024 or None, delay_s, bucket)
            rows += [model.predict(way, load, records, link, speed) for way in ways]
    click.echo(json.dumps(rows, indent=1) if as_json else model.table(rows, known))


def _load(directory: Path, data: Path | None, windows: int, per_window: int, late_share: float) -> workload.Workload:
    start_ms, end_ms = workload.FIRST_MS, workload.FIRST_MS + max(windows, WINDOWS) * WINDOW_MS
    if data is not None and data.is_dir():
        records = workload.read_downloads(data, start_ms, end_ms)
    else:
        if data is not None:
            click.echo(f"{data}: there is no such folder; records are generated", err=True)
        records = workload.generate_downloads(per_window * max(windows, WINDOWS), start_ms, end_ms)
    return workload.prepare(directory, records, SITES, start_ms, WINDOW_MS, windows, late_share)


def _groups(ways: Sequence[Way]) -> list[list[Way]]:
    """Returns the groups of ways that run together.

    Scripts share the machine, because they cost little; other ways run alone.
    """
    scripts = [way for way in ways if way.kind == "script"]
    return ([scripts] if scripts else []) + [[way] for way in ways if way.kind != "script"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for row in rows:
        kept = "" if row["contracts_kept"] is None else f"{row['contracts_kept']} of {row['windows']}"
        error = "" if row["worst_error"] is None else f"{100 * row['worst_error']:.3f}"
        lines.append((
            row["way"], "∞" if row["kib_s"] is None else f"{row['kib_s']:g}", str(row["windows"]),
            f"{row['bytes'] / 1000:,.0f}", _number(row["p50_s"]), _number(row["p95_s"]), error, kept,
            f"{row['cpu_sites_s']:.1f}", f"{row['cpu_center_s']:.1f}", f"{row['rss_site_mib']:.0f}", row["forecast"],
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
