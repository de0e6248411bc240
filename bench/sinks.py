"""Rows per second and CPU of each kind of sink, and the lag from an answer to its row: ``python -m bench.sinks``.

A result store gets answers as the job writes them. `copy`: a sink that begins with all of them. `lag`: the process of
the runner while answers are given at a steady rate. The lag is the age of an answer when its rows are committed.
"""

from __future__ import annotations

import json
import resource
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np

from center.sinks import Sink, SinkRunner, SinkStore, read_definition
from tests.brokers import KafkaBroker
from tests.center.api.conftest import HOUR, T0, Desk
from tests.center.postgres import find_binaries, serving

GROUPS = 200


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def answered(desk: Desk, windows: int, first: int = 0) -> int:
    """Gives answers to windows of `GROUPS` groups. Returns the number of rows."""
    query = desk.register(lateness="9999h") if first == 0 else desk.catalog.queries.get("flights")
    groups: dict[str | None, int] = {f"group-{n}": 1 + n % 3 for n in range(GROUPS)}
    if first == 0:
        desk.report(query, "jfk", T0, groups)
        with desk.results.engine.begin() as connection:  # tables of files get only final answers
            connection.exec_driver_sql("UPDATE answers SET phase = 'final'")
        if windows > 1:
            desk.repeat(query, windows)
            with desk.results.engine.begin() as connection:
                connection.exec_driver_sql(f"UPDATE result_counters SET value = {windows} WHERE name = 'answer'")
    else:
        for n in range(first, first + windows):
            desk.report(query, "jfk", T0 + n * HOUR, groups)
    return windows * GROUPS


def runner_of(desk: Desk, document: dict[str, Any]) -> SinkRunner:
    return SinkRunner(
        read_definition("bench", document), desk.catalog, desk.results, SinkStore(desk.results.engine), owner="bench:1",
        now_ms=lambda: int(time.time() * 1000),  # noqa: TID251
    )  # fmt: skip


def copied(desk: Desk, document: dict[str, Any], windows: int) -> dict[str, Any]:
    rows = answered(desk, windows)
    runner, began_s, cpu = runner_of(desk, document), time.perf_counter(), cpu_s()
    while runner.step() == 0:
        pass
    assert not runner.problem, runner.problem
    took_s, used_s = time.perf_counter() - began_s, cpu_s() - cpu
    runner.stop()
    return {"rows": rows, "rows_per_s": round(rows / took_s), "cpu_us_per_row": round(used_s / rows * 1e6, 1)}


def lag(desk: Desk, document: dict[str, Any], seconds: float, rows_per_s: int) -> dict[str, Any]:
    """Gives an answer of `GROUPS` rows each `GROUPS` / `rows_per_s` seconds. Returns the lags."""
    answered(desk, 1)
    given_s: dict[int, float] = {}
    ages_ms: list[float] = []
    runner, ended = runner_of(desk, document), threading.Event()
    while runner.step() == 0:
        pass
    sink: Sink | None = runner._sink
    assert sink is not None
    write = sink.write

    def timed(answers: Any, position: Any) -> None:
        write(answers, position)
        ages_ms.extend((time.perf_counter() - given_s[a.answer_id]) * 1000 for a in answers if a.answer_id in given_s)

    sink.write = timed  # type: ignore[method-assign]

    def run() -> None:
        while not ended.wait(runner.step()):
            pass

    thread = threading.Thread(target=run)
    thread.start()
    begin_s = time.perf_counter()
    for n in range(int(seconds * rows_per_s / GROUPS)):
        time.sleep(max(0.0, begin_s + n * GROUPS / rows_per_s - time.perf_counter()))
        at_s = time.perf_counter()
        answered(desk, 1, first=n + 1)
        given_s[desk.results.last_answer_id()] = at_s
    time.sleep(2)
    ended.set()
    thread.join()
    runner.stop()
    return {
        "rows_per_s": rows_per_s,
        "answers": len(ages_ms),
        "lag_ms_p50": round(float(np.quantile(ages_ms, 0.5))),
        "lag_ms_p95": round(float(np.quantile(ages_ms, 0.95))),
    }


@click.command(help=__doc__)
@click.option("--windows", default=1_000, help="Windows of 200 groups that are copied.")
@click.option("--seconds", default=20.0, help="Length of the measurement of the lag.")
@click.option("--smoke", is_flag=True, help="A run of seconds.")
def main(windows: int, seconds: float, smoke: bool) -> None:
    if smoke:
        windows, seconds = 20, 1.0
    binaries = find_binaries()
    if binaries is None:
        raise click.ClickException("PostgreSQL 15 or newer is not installed")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serving(binaries))
        broker = KafkaBroker(scratch / "kafka")
        broker.start()
        stack.callback(broker.kill)
        url = server.new_database().replace("+psycopg", "").partition("?")[0]
        catalog = {"type": "sql", "uri": f"sqlite:///{scratch}/iceberg.db", "warehouse": f"file://{scratch}/iceberg"}
        documents: dict[str, dict[str, Any]] = {
            "postgres": {"url": url, "schema": "bench"},
            "kafka": {"brokers": [broker.address]},
            "parquet": {"path": str(scratch / "parquet"), "batch": "0s"},
            "delta": {"path": str(scratch / "delta"), "batch": "0s"},
            "iceberg": {"catalog": catalog, "batch": "0s"},
        }
        for kind, document in documents.items():
            result = copied(desk_in(scratch / f"copy-{kind}"), {"kind": kind, **document}, windows)
            click.echo(json.dumps({"sink": kind, "copy": result}), nl=True)
        document = {"kind": "postgres", "url": url, "schema": "lag"}
        result = lag(desk_in(scratch / "lag"), document, seconds, 1_000)
        click.echo(json.dumps({"sink": "postgres", "lag": result}))


def desk_in(directory: Path) -> Desk:
    directory.mkdir()
    desk = Desk(directory)
    desk.connect("jfk")
    return desk


if __name__ == "__main__":
    main()
