"""`edgewater plan` on small files: what it prints, and what it refuses."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from edgewater.__main__ import main
from edgewater.base.errors import InvalidConfig
from sim.plan.event_times import event_times
from sim.plan.trace import complete_windows
from tests.query_specs import query_spec

pytestmark = pytest.mark.slow

GOLDEN_KEYS = [
    "policy", "eviction", "estimate", "sizing", "aggregate", "edges", "bandwidth_bytes_s", "budget_kind", "budget",
    "windows", "staleness_p95", "error_p95", "bytes",
]  # fmt: skip
BASE_MS = 1_420_156_800_000
WINDOWS, WINDOW_MS, RECORDS = 3, 20_000, 400
Flags = Callable[..., tuple[str | Path, ...]]
QUERY = {
    "name": "q",
    "from": "t",
    "group_by": ["city"],
    "measures": {"v": "sum(amount)"},
    "window": {"tumbling": "20s"},
}


def columns(seed: int = 3) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    size = WINDOWS * RECORDS
    times = BASE_MS + np.sort(rng.integers(0, WINDOWS * WINDOW_MS, size))
    times = rng.permutation(times)  # files need not be in order
    return {
        "at": times.tolist(),
        "city": [f"1.{v}0" for v in np.minimum(rng.zipf(1.5, size), 60)],
        "amount": np.round(rng.exponential(100.0, size), 2).tolist(),
        "region": rng.choice(["north", "south"], size).tolist(),
    }


def write_csv(path: Path, data: dict[str, list[Any]]) -> Path:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(data)
    writer.writerows(zip(*data.values(), strict=True))
    plain = text.getvalue().encode()
    path.write_bytes(gzip.compress(plain) if path.suffix == ".gz" else plain)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "trace.csv", columns())


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    """Writes a query with other keys than those of QUERY, and returns the flags for it."""

    def write(**keys: object) -> tuple[str | Path, ...]:
        file = tmp_path / "query.yaml"
        file.write_text(json.dumps({**QUERY, **keys}))
        return "--query", file, "--time", "at", "--bandwidth", "200B", "--jobs", "1"

    return write


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def rows(*arguments: object) -> list[dict[str, Any]]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def refused(*arguments: object) -> str:
    result = plan(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    return result.stderr.splitlines()[-1]


@pytest.mark.nightly
def test_rows_start_with_the_documented_keys_and_include_all_policies(trace: Path, flags: Flags) -> None:
    found = rows(trace, *flags(), "--policy", "all", "--budget", "1%", "--staleness", "10%", "--edges", 2)
    for row in found:
        assert list(row)[: len(GOLDEN_KEYS)] == GOLDEN_KEYS
        assert (row["aggregate"], row["edges"], row["bandwidth_bytes_s"], row["windows"]) == ("sum", 2, 200, WINDOWS)
        assert row["bytes"] == round(row["updates"] * row["update_bytes"])
        if row["budget_kind"] == "error":
            assert row["budget"] == 0.01
            assert row["error_p95"] <= 0.01 * (1 + 1e-9)
        else:
            assert (row["budget"], row["budget_amount"]) == (0.1, 2000)
    order = ["caching", "streaming", "batching", "random", "optimal"]
    assert [r["policy"] for r in found] == order * 2
    caching, bound = (next(r for r in found if r["policy"] == "caching" and r["budget_kind"] == k)
                      for k in ("error", "staleness"))  # fmt: skip
    assert (caching["eviction"], caching["estimate"], caching["sizing"]) == ("gain", None, None)
    assert (bound["eviction"], bound["estimate"], bound["sizing"]) == ("gain", "acc", "target")
    errors = {r["policy"]: r for r in found if r["budget_kind"] == "error"}
    assert errors["optimal"]["staleness_p95"] <= errors["caching"]["staleness_p95"]
    assert errors["optimal"]["staleness_p95"] < errors["batching"]["staleness_p95"]
    assert errors["optimal"]["bytes"] == errors["batching"]["bytes"] < errors["streaming"]["bytes"]


def test_csv_gzip_ndjson_and_parquet_give_the_same_rows(tmp_path: Path, flags: Flags) -> None:
    data = columns()
    table = pa.table(data)
    plain, packed = write_csv(tmp_path / "t.csv", data), write_csv(tmp_path / "t.csv.gz", data)
    lines = tmp_path / "t.ndjson"
    lines.write_text("".join(json.dumps(r) + "\n" for r in table.to_pylist()))
    with_times = table.set_column(0, "at", table["at"].cast(pa.timestamp("ms", "UTC")))
    pq.write_table(with_times, tmp_path / "t.parquet")
    halves = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pq.write_table(table[:500], halves[0])
    pq.write_table(table[500:], halves[1])
    wanted = rows(plain, *flags(), "--budget", "1%", "--policy", "batching")
    for files in ([packed], [lines], [tmp_path / "t.parquet"], halves):
        assert rows(*files, *flags(), "--budget", "1%", "--policy", "batching") == wanted


def test_the_seed_decides_what_a_random_policy_sends(trace: Path, flags: Flags) -> None:
    arguments = (trace, *flags(), "--budget", "0.1%", "--policy", "random", "--windows", 2)
    ((first,), (again,), (other,)) = (rows(*arguments, "--seed", seed) for seed in (0, 0, 1))
    assert first == again and {**first, "seed": 1} != other


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_rows_in_any_number_of_processes(trace: Path, flags: Flags) -> None:
    arguments = (trace, *flags(), "--budget", "2%", "--policy", "random", "--edges", 2, "--windows", 1)
    first = rows(*arguments, "--policy", "caching")
    assert rows(*arguments, "--policy", "caching", "--jobs", 2) == first
    (other,) = rows(*arguments, "--seed", 1)
    (same,) = (row for row in first if row["policy"] == "random")
    assert other["staleness_p95"] != same["staleness_p95"]


def test_without_a_budget_a_sweep_is_run_and_the_budget_of_the_query_is_marked(trace: Path, tmp_path: Path) -> None:
    query = tmp_path / "q.yaml"
    query.write_text(
        "{name: q, from: t, group_by: [city], measures: {n: count(), money: sum(amount)}, where: amount > 1,"
        " window: {tumbling: 20s}, budget: {error: {money: 50}}}"
    )
    arguments = ("--query", query, "--time", "at", "--bandwidth", "1KiB", "--jobs", "1", "--policy", "optimal")
    found = rows(trace, *arguments)
    swept = [r["budget"] for r in found if not r["budget_of_query"]]
    assert swept == [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
    (own,) = [r for r in found if r["budget_of_query"]]
    assert own["budget_amount"] == 50
    assert own["budget"] == pytest.approx(50 / own["largest_error"])
    assert own["aggregate"] == "sum"  # that of the budget, not the first measure
    printed = plan(trace, *arguments)
    assert "* the budget of the query" in printed.stdout
    assert "where:" in printed.stderr


def test_a_query_with_a_staleness_budget_sweeps_staleness(trace: Path, tmp_path: Path) -> None:
    query = tmp_path / "q.yaml"
    query.write_text(
        "{name: q, from: t, group_by: [city], measures: {n: count()}, window: {tumbling: 20s}, budget: {staleness: 2s}}"
    )
    found = rows(trace, "--query", query, "--time", "at", "--bandwidth", "100", "--policy", "optimal", "--jobs", 1)
    assert {r["budget_kind"] for r in found} == {"staleness"}
    assert [r["budget_amount"] for r in found if r["budget_of_query"]] == [2000]
    assert all(r["staleness_p95"] <= r["budget"] * (1 + 1e-9) for r in found)


def test_combined_budgets_are_pairs_and_windows_beyond_the_staleness_are_late(trace: Path, flags: Flags) -> None:
    grid = ("--budget", "0%", "--budget", "10%", "--staleness", "1ms", "--staleness", "19s", "--windows", 1)
    combined = flags(budget={"error": {"v": 50}, "staleness": "2s"})
    found = rows(trace, *combined, *grid, "--policy", "optimal")
    pairs = [(ms, share) for ms in (1, 19_000) for share in (0.0, 0.1)]
    assert [(r["staleness_budget_ms"], r["budget"]) for r in found] == pairs
    waits_ms = [r["staleness_p95"] * WINDOW_MS for r in found]
    assert [r["late_windows"] for r in found] == [waited > ms for waited, (ms, _) in zip(waits_ms, pairs, strict=True)]
    assert {r["late_windows"] for r in found} == {0, 1}


@pytest.mark.nightly
def test_combined_budgets_show_bytes_against_error_and_staleness(trace: Path, flags: Flags) -> None:
    grid = ("--budget", "1%", "--budget", "10%", "--staleness", "1s", "--staleness", "10s", "--windows", 2)
    combined = flags(budget={"error": {"v": 50}, "staleness": "2s"})
    found = rows(trace, *combined, *grid, "--policy", "caching", "--policy", "optimal")
    assert [(r["policy"], r["staleness_budget_ms"], r["budget"]) for r in found] == [
        (name, ms, share) for name in ("caching", "optimal") for ms in (1000, 10_000) for share in (0.01, 0.1)
    ]
    assert {r["budget_kind"] for r in found} == {"combined"}
    for row in found:
        assert row["error_p95"] <= row["budget"] * (1 + 1e-9)
        assert row["late_windows"] == 0 or row["staleness_budget_ms"] == 1000
    cheap, dear = found[3], found[0]
    assert cheap["bytes"] < dear["bytes"], "a larger error and a later answer take fewer bytes"
    printed = plan(trace, *combined, "--budget", "1%", "--staleness", "10s", "--policy", "optimal").stdout
    assert "combined 1%" in printed and ", 10s" in printed


def test_a_query_with_a_combined_budget_sweeps_the_error(trace: Path, tmp_path: Path) -> None:
    query = tmp_path / "q.yaml"
    query.write_text(
        "{name: q, from: t, group_by: [city], measures: {money: sum(amount)}, window: {tumbling: 20s},"
        " budget: {error: {money: 50}, staleness: 2s}}"
    )
    found = rows(trace, "--query", query, "--time", "at", "--bandwidth", "1KiB", "--policy", "optimal", "--jobs", 1)
    assert len(found) == 10
    assert {(r["budget_kind"], r["staleness_budget_ms"]) for r in found} == {("combined", 2000)}
    assert [r["budget_amount"] for r in found if r["budget_of_query"]] == [50]


def test_a_modelled_connection_shows_the_bytes_of_headers_and_the_delay_of_the_link(trace: Path, flags: Flags) -> None:
    given = (*flags(), "--budget", "5%", "--policy", "caching", "--policy", "batching")
    updates, wire, far = (rows(trace, *given, *more) for more in ((), ("--wire",), ("--wire", "--delay", "2s")))
    assert [r["wire"] for r in updates] == [False] * len(updates)
    assert [r["wire"] for r in wire] == [r["policy"] == "caching" for r in wire]
    for row, more, most in zip(updates, wire, far, strict=True):
        if row["policy"] == "caching":
            assert more["bytes"] > row["bytes"]
            assert most["staleness_p95"] * WINDOW_MS > more["staleness_p95"] * WINDOW_MS + 500
            assert max(more["error_p95"], most["error_p95"]) <= 0.05
        else:
            assert row == more == most


@pytest.mark.nightly
def test_count_max_and_min_are_supported(trace: Path, flags: Flags) -> None:
    found = rows(trace, *flags(measures={"n": "count()"}), "--budget", "5%", "--policy", "optimal")
    assert found[0]["aggregate"] == "count"
    for aggregate, edges in (("max", 2), ("min", 1), ("min", 3)):
        measured = flags(measures={"v": f"{aggregate}(amount)"})
        (caching,) = rows(trace, *measured, "--budget", "5%", "--edges", edges)
        assert caching["aggregate"] == aggregate
        assert caching["error_p95"] <= 0.05 * (1 + 1e-9)


@pytest.mark.nightly
def test_records_are_assigned_to_edges_by_a_column(trace: Path, flags: Flags) -> None:
    by_region = plan(trace, *flags(), "--budget", "1%", "--policy", "batching", "--edge-column", "region")
    assert "edges: 2, assigned by the column region (2 values)" in by_region.stderr
    more_edges_than_values = rows(trace, *flags(), "--budget", "1%", "--edge-column", "region", "--edges", 3)
    assert more_edges_than_values[0]["edges"] == 3


def test_omitted_records_are_reported(tmp_path: Path, flags: Flags) -> None:
    data = columns()
    data["amount"][:3] = ["", "NaN", "-5"]
    data["at"][3] = "yesterday"
    result = plan(write_csv(tmp_path / "t.csv", data), *flags(), "--budget", "1%", "--policy", "batching")
    assert result.exit_code == 0, result.stderr
    assert "omitted 2 records without a finite value" in result.stderr
    assert "1 records have a negative value" in result.stderr
    assert "1 of 1,200 records have no readable time in at (the first one is yesterday)" in result.stderr


def test_a_date_and_a_time_of_day_are_joined(tmp_path: Path, flags: Flags) -> None:
    data = columns()
    stamps = [str(np.datetime64(t, "ms")).split("T") for t in data.pop("at")]
    split = {"day": [d for d, _ in stamps], "hour": [h for _, h in stamps], **data}
    others = [f for f in flags() if f not in ("--time", "at")]
    budget = ("--budget", "1%", "--policy", "batching")
    joined = rows(write_csv(tmp_path / "t.csv", split), *others, "--time", "day", "--time", "hour", *budget)
    assert joined == rows(write_csv(tmp_path / "u.csv", columns()), *flags(), *budget)


def test_a_table_is_printed(trace: Path, flags: Flags) -> None:
    arguments = (trace, *flags(), "--budget", "0", "--budget", "50", "--staleness", "1s", "--policy", "optimal")
    result = plan(*arguments, "--policy", "batching")
    assert result.exit_code == 0, result.stderr
    assert "staleness 5% (1s)" in result.stdout
    assert "optimal" not in result.stderr  # no progress bar without a terminal


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        (["--budget", "-5"], ["--budget", "'-5'", "an amount in the measure's unit"]),
        (["--budget", "5 bananas"], ["--budget", "'5 bananas'", "of the largest possible error"]),
        (["--budget", "nan"], ["--budget", "'nan'"]),
        (["--budget", "101%"], ["--budget", "'101%'", "0% to 100%"]),
        (["--staleness", "5"], ["--staleness", "'5'", "a duration such as 2s"]),
        (["--staleness", "-1s"], ["--staleness", "'-1s'"]),
        (["--policy", "clever"], ["--policy", "'clever'", "caching, streaming, batching, random, optimal, or all"]),
        (["--bandwidth", "0"], ["--bandwidth", "'0'", "it must be positive"]),
        (["--bandwidth", "fast"], ["--bandwidth", "'fast'", "64KiB"]),
        (["--edge-column", "pop"], ["--edge-column", "'pop'", "at, city, amount, region"]),
        (["--query", "nowhere.yaml"], ["--query", "'nowhere.yaml'"]),
    ],
)
def test_bad_flags_are_refused_with_field_value_and_what_is_accepted(
    trace: Path, flags: Flags, bad: list[str], parts: list[str]
) -> None:
    message = refused(trace, *flags(), *bad)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"measures": {"v": "mean(amount)"}}, ["measures.v", "'mean(amount)'", "sum, count, min, max"]),
        ({"window": {"sliding": "20s", "every": "10s"}}, ["window", "tumbling windows"]),
        ({"window": {"tumbling": "1h"}}, ["window", "'1h'", "no window is complete"]),
        ({"group_by": ["town"]}, ["group_by.0", "'town'", "no such column", "at, city, amount, region"]),
        ({"measures": {"v": "sum(region)"}}, ["measures.v", "'string'", "int64 or float64"]),
    ],
)
def test_queries_that_cannot_be_planned_are_refused(
    trace: Path, flags: Flags, keys: dict[str, object], parts: list[str]
) -> None:
    message = refused(trace, *flags(**keys), "--budget", "1%")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.parquet", "nope", "a readable file: Parquet"),
        ("t.txt", "a,b\n", "files that end in .csv"),
        ("t.csv", "", "has no such column"),
        ("t.csv", "at,city,amount\n", "at least one record"),
        ("t.csv", "at,city,amount\nhello,a,1\n", "no row has a readable time (the first one is hello)"),
        ("t.csv", "at,city,amount\n1420156800000,a,\n", "no record is left"),
        ("t.csv", "at,city,amount\n1420156800000,a,0\n", "all values are 0"),
        ("t.csv", "at,city,amount\n1420156800,a,1\n1420156801,b,1\n", "look like seconds since 1970"),
        ("t.csv", "at,city,amount\n1420156800000000,a,1\n", "look like microseconds"),
        ("t.ndjson", "[1,2]\n{", "one JSON object per line"),
        ("t.csv.gz", "not gzip", "a readable file: CSV with a header line"),
    ],
)
def test_unusable_traces_are_refused_with_the_reason(
    tmp_path: Path, flags: Flags, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    window = {"tumbling": "1ms" if "all values" in message else "20s"}
    assert message in refused(tmp_path / name, *flags(window=window))


def test_a_missing_file_is_named(tmp_path: Path, flags: Flags) -> None:
    assert "nowhere.csv" in refused(tmp_path / "nowhere.csv", *flags())


def test_times_in_seconds_are_read_with_their_unit() -> None:
    notes: list[str] = []
    table = pa.table({"at": pa.array([1420156800.5, 1420156801.001, None])})
    millis, valid = event_times(table, ["at"], "s", notes.append)
    assert millis[valid].tolist() == [1420156800500, 1420156801001]
    assert len(notes) == 1


def test_dates_without_a_time_of_day_are_said_and_more_than_two_columns_refused() -> None:
    notes: list[str] = []
    table = pa.table({"day": ["2015-01-01", "2015-01-02"], "hour": ["00:00:01", "05:15:00"]})
    event_times(table, ["day"], None, notes.append)
    assert notes == ["every time in day is a midnight; with a time of day in another column: --time DATE --time TIME"]
    event_times(table, ["day", "hour"], None, notes.append)
    assert len(notes) == 1
    with pytest.raises(InvalidConfig) as error:
        event_times(table, ["day", "hour", "hour"], None, notes.append)
    assert error.value.field == "--time"


def test_windows_at_the_borders_of_the_trace_are_used_only_if_complete() -> None:
    query = query_spec(stream="t")
    whole = np.arange(0, 5000, 10)
    assert complete_windows(whole, query) == (0, 5000)
    assert complete_windows(whole[30:], query) == (1000, 5000)
    assert complete_windows(whole[:-30], query) == (0, 4000)
    assert complete_windows(whole[3:-3], query) == (0, 5000)  # 30 ms of 1 s: by chance


def test_a_first_record_without_a_value_does_not_crash_the_reader(tmp_path: Path, flags: Flags) -> None:
    data = columns()
    data["amount"][0] = None
    path = tmp_path / "trace.ndjson"
    path.write_text(
        "".join(json.dumps(dict(zip(data, row, strict=True))) + "\n" for row in zip(*data.values(), strict=True))
    )
    assert rows(path, *flags(), "--budget", "5%")


def test_several_queries_on_one_link_are_forecast_together(trace: Path, tmp_path: Path) -> None:
    parts = {
        "timely": ("sum(amount)", {"staleness": "5s"}),
        "exact": ("count()", None),
        "limited": ("max(amount)", {"error": {"v": 5}}),
    }
    arguments: list[str | Path] = []
    for name, (measure, budget) in parts.items():
        query = {
            "name": name,
            "from": "s",
            "group_by": ["city"],
            "measures": {"v": measure},
            "window": {"tumbling": "20s"},
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(query if budget is None else {**query, "budget": budget}))
        arguments += ["--query", file]

    def verdicts(width: str, *chosen: str | Path) -> list[str]:
        return [row["in_time"] for row in rows("link", trace, "--time", "at", "--bandwidth", width, *chosen)]

    wide = rows("link", trace, "--time", "at", "--bandwidth", "1KiB", *arguments)
    assert [(row["query"], row["in_time"]) for row in wide] == [(name, "yes") for name in parts]
    assert wide[0]["link_share"] == pytest.approx(wide[0]["bytes_per_window"] / 20 / 1024)
    assert verdicts("5", *arguments) == ["no", "no", "unknown"]
    # Alone it has the link; beside the others nobody knows.
    need = sum(row["bytes_per_window"] for row in wide) / 20
    assert verdicts(str(round(1.1 * need)), *arguments)[1] == "unknown"
    assert verdicts(str(round(1.1 * need)), *arguments[2:4]) == ["yes"]
    assert "exact is in two files" in refused("link", trace, "--time", "at", "--bandwidth", "1KiB", *arguments[2:4] * 2)
