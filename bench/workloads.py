"""Known workloads as registered queries: through real edges, Spark and REST, compared with the truth.

- ``ysb``: Yahoo's streaming benchmark. Views of ads are joined with their campaigns and counted per campaign and 10 s.
- ``taxi``: trips by pickup zone and day, fares by hour of the day, and zones of the longest trips, by New York's clock.
- ``linear-road``: vehicles per segment and minute, and the mean speed of a segment over the last five minutes.

Linear Road asks for more than windowed queries: accidents need the last four reports of each vehicle, and tolls a join
of a vehicle's position with its segment. Both are joins of streams, which Edgewater does not have.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from bench.data import TAXI, existing
from edgewater.base.quantities import duration_ms
from edgewater.base.timestamps import parse_time, rfc3339
from edgewater.client import Answer, Center
from sim.demo.ports import free_address
from sim.demo.run import Demo

T0 = 1_640_995_200_000
"""2022-01-01T00:00:00Z."""
NEW_YORK = "America/New_York"
TIMEOUT_S = 300.0
CAMPAIGNS, ADS = 100, 10
WINDOW_S = 10
EDGE_START_S = 8.0
WARM_UP = 3
"""The first windows whose latency is not measured."""
AS_FAST_AS_POSSIBLE: Mapping[str, Any] = {"speed": "max"}
Groups = dict[tuple[Any, ...], float]


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a workload.

    Attributes:
        question: parameters of its answers; with ``every``, they are rolled up.
        truth: (start of the window, key…) -> value of the measure ``v``.
        tolerance: the largest relative difference from the truth. 0: equal.
    """

    spec: dict[str, Any]
    truth: Groups
    question: dict[str, str] = field(default_factory=dict)
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Records of a stream by edge, and the queries that read them.

    Attributes:
        stream: the stream's section of an edge's configuration, without sources.
        parts: the records of each edge.
    """

    name: str
    stream: dict[str, Any]
    parts: list[pa.Table]
    queries: list[Query]


def _grouped(keys: dict[str, Any], value: Any, how: str) -> Groups:
    """Groups a table by its keys. All keys are in the groups, in their order."""
    table = pa.table({**keys, "v": value}).group_by(list(keys)).aggregate([("v", how)])
    columns = [table.column(name).to_pylist() for name in keys]
    return dict(zip(zip(*columns, strict=True), table.column(f"v_{how}").to_pylist(), strict=True))


def ysb(directory: Path, records: int, per_s: float = 20_000.0) -> Workload:
    """Views, clicks and purchases of 1,000 ads. A file maps each ad to one of 100 campaigns.

    Args:
        per_s: records per second of event time.
    """
    rng = np.random.default_rng(1)
    ads = [f"ad-{n:04}" for n in range(CAMPAIGNS * ADS)]
    campaign_of = np.arange(CAMPAIGNS * ADS) // ADS
    lookup = directory / "ads.csv"
    csv.write_csv(pa.table({"ad": ads, "campaign": [f"campaign-{n:03}" for n in campaign_of]}), lookup)
    at = T0 + np.sort(rng.integers(0, max(round(1000 * records / per_s), 40_000), records))
    ad, kind = rng.integers(0, len(ads), records), rng.integers(0, 3, records)
    table = pa.table(
        {
            "user": pa.array(rng.integers(0, 100_000, records)).cast(pa.string()),
            "page": pa.array(rng.integers(0, 100_000, records)).cast(pa.string()),
            "ad": pa.array(ads).take(pa.array(ad)),
            "event": pa.array(["view", "click", "purchase"]).take(pa.array(kind)),
            "at": at,
        }
    )
    views = kind == 0
    windows = (at[views] - T0) // 10_000 * 10_000 + T0
    keys = {"w": windows, "campaign": pa.array([f"campaign-{n:03}" for n in campaign_of[ad[views]]])}
    half = rng.integers(0, 2, records)
    return Workload(
        "ysb",
        {
            "columns": {"user": "string", "page": "string", "ad": "string", "event": "string"},
            "time": {"column": "at", "unit": "ms"},
            "lookups": [{"file": str(lookup), "key": "ad", "columns": {"campaign": "string"}}],
        },
        [table.filter(pa.array(half == part)) for part in (0, 1)],
        [
            Query(
                {"where": "event = 'view'", "group_by": ["campaign"], "measures": {"v": "count()"},
                 "window": {"tumbling": "10s"}},
                _grouped(keys, np.ones(int(views.sum()), np.int64), "sum"),
            )
        ],
    )  # fmt: skip


def taxi(directory: Path, records: int) -> Workload:
    """Green taxis of a quarter, or generated trips; a file has the name and borough of each zone."""
    if records:
        rng = np.random.default_rng(2)
        at = T0 + np.sort(rng.integers(0, 3 * 86_400_000, records))
        zone, fare = rng.integers(1, 265, records), np.round(rng.gamma(2, 7, records), 2)
        zones = pa.table({"zone_id": np.arange(1, 266), "zone": [f"zone {n}" for n in range(1, 266)]})
    else:
        months = [pq.read_table(path) for path in sorted(existing(TAXI).glob("*.parquet"))]
        columns = ["lpep_pickup_datetime", "PULocationID", "fare_amount"]
        trips = pa.concat_tables([month.select(columns) for month in months], promote_options="permissive")
        times = trips.column("lpep_pickup_datetime").combine_chunks().cast(pa.timestamp("ms"))
        # Local times: of an hour that clocks repeat, the first one.
        zoned = pc.assume_timezone(times, NEW_YORK, ambiguous="earliest", nonexistent="latest")
        at, order = _sorted(zoned.cast(pa.int64()).to_numpy())
        inside = (at >= T0) & (at < T0 + 91 * 86_400_000)
        at, order = at[inside], order[inside]
        zone = trips.column("PULocationID").to_numpy()[order]
        fare = trips.column("fare_amount").to_numpy()[order]
        zones = csv.read_csv(TAXI / "taxi_zone_lookup.csv").select(["LocationID", "Zone"])
        zones = zones.rename_columns(["zone_id", "zone"])
    lookup = directory / "zones.csv"
    csv.write_csv(zones, lookup)
    names = dict(zip(zones.column("zone_id").to_pylist(), zones.column("zone").to_pylist(), strict=True))
    local = pc.local_timestamp(pa.array(at).cast(pa.timestamp("ms", NEW_YORK)))
    midnight = pc.assume_timezone(pc.floor_temporal(local, 1, unit="day"), NEW_YORK).cast(pa.int64())
    named = pa.array([names[n] for n in zone.tolist()], pa.string())
    cents = np.rint(fare * 100).astype(np.int64)
    hour_of_window = at // 3_600_000 * 3_600_000
    table = pa.table({"zone_id": zone.astype(np.int64), "cents": cents, "at": at})
    return Workload(
        "taxi",
        {
            "columns": {"zone_id": "int64", "cents": "int64"},
            "time": {"column": "at", "unit": "ms"},
            "lookups": [{"file": str(lookup), "key": "zone_id", "columns": {"zone": "string"}}],
        },
        [table.filter(pa.array(zone % 4 == part)) for part in range(4)],
        [
            Query(
                {"group_by": ["zone"], "measures": {"v": "count()"}, "window": {"tumbling": "1h"}},
                _grouped({"w": midnight, "zone": named}, np.ones(len(at), np.int64), "sum"),
                {"every": "day", "zone": NEW_YORK},
            ),
            Query(
                {"group_by": [{"hour": f"hour(event_time_ms AT TIME ZONE '{NEW_YORK}')"}],
                 "measures": {"v": "sum(cents)"}, "window": {"tumbling": "1h"}},
                _grouped({"w": hour_of_window, "hour": pc.hour(local)}, cents, "sum"),
            ),
            Query(
                {"group_by": [{"class": "CASE WHEN cents >= 5000 THEN 'long' ELSE 'short' END"}],
                 "measures": {"v": "quantile(cents, 0.9)"}, "window": {"tumbling": "1d"}},
                _quantiles(at // 86_400_000 * 86_400_000, np.where(cents >= 5000, "long", "short"), cents),
                tolerance=0.0101,
            ),
        ],
    )  # fmt: skip


def _sorted(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(times, kind="stable")
    return times[order], order


def _quantiles(windows: np.ndarray, groups: np.ndarray, values: np.ndarray) -> Groups:
    result: Groups = {}
    for window in np.unique(windows).tolist():
        for group in ("long", "short"):
            inside = values[(windows == window) & (groups == group)]
            if len(inside):
                result[window, group] = float(np.quantile(inside, 0.9, method="lower"))
    return result


def linear_road(directory: Path, records: int) -> Workload:
    """Position reports of vehicles on two expressways, one edge each; a vehicle reports every 30 s."""
    rng = np.random.default_rng(3)
    vehicles = max(records // 40, 50)
    second = np.repeat(np.arange(0, 30 * -(-records // vehicles), 30), vehicles)[:records]
    vehicle = np.tile(np.arange(vehicles), -(-records // vehicles))[:records]
    at = T0 + second * 1000 + vehicle % 30 * 1000
    order = np.argsort(at, kind="stable")
    at, vehicle = at[order], vehicle[order]
    speed = rng.integers(0, 101, records)
    segment = (vehicle * 7 + (at - T0) // 60_000) % 100
    way, direction = vehicle % 2, vehicle // 2 % 2
    table = pa.table({"vid": vehicle, "speed": speed, "xway": way, "dir": direction, "seg": segment, "at": at})
    minute = (at - T0) // 60_000 * 60_000 + T0
    keys = {"w": minute, "xway": way, "dir": direction, "seg": segment}
    speeds: Groups = {}
    for earlier in range(5):  # the windows of five minutes that contain a record begin up to four minutes earlier
        shifted = {**keys, "w": minute - earlier * 60_000}
        for key, total in _grouped(shifted, speed, "sum").items():
            speeds[key] = speeds.get(key, 0) + total
    common = {"group_by": ["xway", "dir", "seg"]}
    return Workload(
        "linear-road",
        {
            "columns": dict.fromkeys(("vid", "speed", "xway", "dir", "seg"), "int64"),
            "time": {"column": "at", "unit": "ms"},
        },
        [table.filter(pa.array(way == part)) for part in (0, 1)],
        [
            Query({**common, "measures": {"v": "distinct(vid)"}, "window": {"tumbling": "1m"}},
                  _grouped(keys, vehicle, "count_distinct"), tolerance=0.05),
            Query({**common, "measures": {"v": "sum(speed)"}, "window": {"sliding": "5m", "every": "1m"}}, speeds),
        ],
    )  # fmt: skip


WORKLOADS: dict[str, Callable[[Path, int], Workload]] = {"ysb": ysb, "taxi": taxi, "linear-road": linear_road}
RECORDS = {"ysb": 4_000_000, "taxi": 0, "linear-road": 400_000}
SMOKE_RECORDS = {"ysb": 6_000, "taxi": 3_000, "linear-road": 3_000}


def run(workload: Workload, directory: Path) -> dict[str, Any]:
    """Runs a workload as fast as its files can be read. Raises DemoFailed, or TimeoutError without all answers."""
    system = Demo(directory, 0.0)
    try:
        system.start_center()
        names = _register(system, workload)
        began, before = time.monotonic(), _cpu_s(system, "center")
        for part, table in enumerate(workload.parts):
            _start_edge(system, workload, f"e{part}", table)
        _wait(system, workload, names)
        took, center = time.monotonic() - began, _cpu_s(system, "center") - before
        edges = sum(_cpu_s(system, f"e{part}") for part in range(len(workload.parts)))
        records = sum(len(table) for table in workload.parts)
        rows = [
            {"query": name, **_compared(system, name, query)}
            for name, query in zip(names, workload.queries, strict=True)
        ]
    finally:
        system.stop()
    return {
        "workload": workload.name, "records": records, "seconds": round(took, 2), "cpu_edges_s": round(edges, 2),
        "cpu_center_s": round(center, 2), "records_per_cpu_s": round(records / (edges + center)), "queries": rows,
    }  # fmt: skip


def run_paced(directory: Path, per_s: float, windows: int) -> dict[str, Any]:
    """Runs YSB at a fixed rate, in real time, and measures latency: from the end of a window to its complete answer.

    The latency includes the time until a client of REST has the answer. The first windows are left out, since the
    center compiles meanwhile.
    """
    workload = ysb(directory, round(per_s * WINDOW_S * windows), per_s)
    system = Demo(directory, 0.0)
    latencies: dict[int, float] = {}
    try:
        system.start_center()
        ((name,), (query,)) = _register(system, workload), workload.queries
        edges = [f"e{part}" for part in range(len(workload.parts))]
        begin_s = time.time() + EDGE_START_S  # noqa: TID251
        replay = {"start": rfc3339(T0), "at": rfc3339(round(1000 * begin_s)), "speed": 1.0}
        for edge, table in zip(edges, workload.parts, strict=True):
            _start_edge(system, workload, edge, table, replay)
        with Center(system.url) as center:
            for event in center.query(name).live():
                if not isinstance(event, Answer) or event.members["phase"] == "early":
                    continue
                end_ms = round(event.end.timestamp() * 1000)
                latencies.setdefault(end_ms, time.time() - begin_s - (end_ms - T0) / 1000)  # noqa: TID251
                if len(latencies) == windows:
                    break
        cpu_s = {name: _cpu_s(system, name) for name in ("center", *edges)}
        compared = _compared(system, name, query)
    finally:
        system.stop()
    measured_ms = [1000 * latencies[end] for end in sorted(latencies)[WARM_UP:]]
    p50, p99 = np.percentile(measured_ms, (50, 99)).tolist()
    return {
        "workload": "ysb", "records_per_s": per_s, "windows": len(measured_ms),
        "latency_ms": {"p50": round(p50), "p99": round(p99), "max": round(max(measured_ms))},
        "cpu_s": {name: round(seconds, 1) for name, seconds in cpu_s.items()}, **compared,
    }  # fmt: skip


def _register(system: Demo, workload: Workload) -> list[str]:
    """Registers the queries of a workload. Returns their names."""
    names = [f"w{number}" for number in range(len(workload.queries))]
    edges = [f"e{part}" for part in range(len(workload.parts))]
    for name, query in zip(names, workload.queries, strict=True):
        spec = {"name": name, "from": workload.name.replace("-", "_"), **query.spec, "edges": edges}
        system.client.post("/v1/queries", json=spec).raise_for_status()
    return names


def _start_edge(
    system: Demo, workload: Workload, name: str, table: pa.Table, replay: Mapping[str, Any] = AS_FAST_AS_POSSIBLE
) -> None:
    path = system.directory / f"{name}.parquet"
    pq.write_table(table, path)
    config = {
        "edge": name,
        "center": {"address": f"127.0.0.1:{system.gateway_port}"},
        "state_dir": str(system.directory / "state" / name),
        "http": {"listen": free_address()},
        "streams": {
            workload.name.replace("-", "_"): {
                **workload.stream,
                "replay": replay,
                "sources": [{"file": {"path": str(path)}}],
            }
        },
    }
    system._start(name, ["edge", "run", system._write(f"{name}.yaml", config)])


def _cpu_s(system: Demo, name: str) -> float:
    """CPU time of a process and of its children."""
    process = psutil.Process(system.processes[name].pid)
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


def _wait(system: Demo, workload: Workload, names: list[str]) -> None:
    """Waits until each query has a complete answer to the window of the last record."""
    last_ms = max(pc.max(table.column("at")).as_py() for table in workload.parts)
    deadline, left = time.monotonic() + TIMEOUT_S, dict(zip(names, workload.queries, strict=True))
    while left:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{', '.join(left)}: not all windows were answered in {TIMEOUT_S:.0f} s")
        system.check_alive()
        for name, query in list(left.items()):
            window = query.spec["window"]
            step_ms = duration_ms(window.get("every") or window["tumbling"], "window")
            reply = system.client.get(f"/v1/queries/{name}/latest")
            if reply.status_code != 200:
                continue
            answer = reply.json()
            is_last = _start_ms(answer) == last_ms // step_ms * step_ms
            if is_last and answer["quality"]["completeness"]["ratio"] == 1:
                del left[name]
        time.sleep(0.05)


def _start_ms(answer: dict[str, Any]) -> int:
    return parse_time(answer["window"]["start"])


def _compared(system: Demo, name: str, query: Query) -> dict[str, Any]:
    """Compares all answers of a query with the truth."""
    resource = "rollup" if query.question else "windows"
    estimates: Groups = {}
    outside, params = 0, {**query.question, "limit": "500"}
    while True:
        page = system.client.get(f"/v1/queries/{name}/{resource}", params=params).raise_for_status().json()
        for answer in page["answers"]:
            for row in answer["data"]:
                key, cell = (_start_ms(answer), *row["group"].values()), row["v"]
                estimates[key] = cell["estimate"]
                truth = query.truth.get(key)
                outside += truth is None or not (cell["lower"] is None or cell["lower"] <= truth)
                outside += truth is not None and cell["upper"] is not None and cell["upper"] < truth
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    wrong = [
        key for key, truth in query.truth.items()
        if key not in estimates or abs(estimates[key] - truth) > query.tolerance * abs(truth)
    ]  # fmt: skip
    return {"groups": len(query.truth), "wrong": len(wrong), "outside_of_interval": outside}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(WORKLOADS)))
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON.")
@click.option("--smoke", is_flag=True, help="Check that the bench runs, with few generated records.")
@click.option(
    "--pace",
    type=click.FloatRange(1),
    help="Run YSB alone, at this number of records per second, and measure its latency. Prints JSON.",
)
@click.option(
    "--windows", type=click.IntRange(WARM_UP + 1), default=33, show_default=True, help="With `--pace`: windows of 10 s."
)
def main(names: tuple[str, ...], as_json: bool, smoke: bool, pace: float | None, windows: int) -> None:
    """Run known workloads through real edges, Spark and REST, and compare every answer with the truth."""
    rows = []
    if pace is not None:
        with tempfile.TemporaryDirectory(prefix="edgewater-workloads.") as directory:
            click.echo(json.dumps(run_paced(Path(directory), pace, windows), indent=2))
        return
    for name in names or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="edgewater-workloads.") as directory:
            workload = WORKLOADS[name](Path(directory), (SMOKE_RECORDS if smoke else RECORDS)[name])
            rows.append(run(workload, Path(directory)))
        if not as_json:
            _print(rows[-1])
    if as_json:
        click.echo(json.dumps(rows, indent=2))


def _print(row: dict[str, Any]) -> None:
    click.echo(
        f"{row['workload']}: {row['records']:,} records in {row['seconds']} s; CPU edges {row['cpu_edges_s']} s, "
        f"center {row['cpu_center_s']} s; {row['records_per_cpu_s']:,} records per CPU second"
    )
    for query in row["queries"]:
        click.echo(
            f"  {query['query']}: {query['groups']:,} groups and windows, {query['wrong']} wrong, "
            f"{query['outside_of_interval']} outside of their interval"
        )


if __name__ == "__main__":
    main()
