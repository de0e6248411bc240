"""The tables of docs/explanation/papers.md, from the files that the benches of the four papers write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]
Cells = list[list[str]]
ERROR_POLICIES = ("optimal", "gain", "lru", "spe", "mae", "random", "batching", "streaming")
STALENESS_POLICIES = (
    "optimal", "gain", "lru/prev_window/acc", "lru/linear/acc", "lru/pure_pess/acc", "lru/prev_window/explicit",
    "random", "batching", "streaming",
)  # fmt: skip
RIVALS = ("edgewater", "aion", "aion-minus", "aq-k-slack", "k-slack", "default")
SCHEDULERS = ("klink", "fair", "fcfs", "hr", "streambox", "edf", "srpt")
CAPPED = ("klink", "klink w/o MM", "klink, reduction first", "fair", "edf")


def number(value: float | None) -> str:
    """Returns a number with two significant digits below 100, and all digits before the point above."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else "0" if abs(value) < 1e-9 else f"{value:.2g}"


def crossed(
    rows: Iterable[Row], key: Sequence[str], column: str, columns: Sequence[str], cell: Callable[[Row], str],
    titles: dict[str, str] | None = None,
) -> Cells:  # fmt: skip
    """Returns a row for each value of `key`, and a cell for each of `columns`, the values of the member `column`."""
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in key), {})[row[column]] = cell(row)
    head = [*key, *((titles or {}).get(name, name) for name in columns)]
    shown = [[*(f"{v:g}" if isinstance(v, float) else str(v) for v in k), *(by.get(c, "–") for c in columns)]
             for k, by in found.items()]  # fmt: skip
    return [head, *shown]


def error_budgets(rows: list[Row]) -> Cells:
    chosen = [row for row in rows if row["kind"] == "error"]
    key = ("aggregate", "bandwidth", "budget")
    return crossed(chosen, key, "label", ERROR_POLICIES, lambda row: number(row["staleness_p95"]))


def staleness_budgets(rows: list[Row]) -> Cells:
    chosen = [row for row in rows if row["kind"] == "staleness"]
    key = ("aggregate", "bandwidth", "budget")
    return crossed(chosen, key, "label", STALENESS_POLICIES, lambda row: number(row["error_p95"]))


def aion_latency(document: Row) -> Cells:
    def cell(row: Row) -> str:
        return f"{number(median(row['latencies_ms']))}, {number(row['latency_ms_mean'])}"

    return crossed(document["baselines"], ("values", "delays", "rate"), "algorithm", RIVALS, cell)


def aion_sampling(document: Row) -> Cells:
    def cell(row: Row) -> str:
        return f"{row['sampling_rate']:.2f}, {row['coverage']:.0%}"

    return crossed(document["baselines"], ("values", "delays", "rate"), "algorithm", RIVALS, cell)


def _seconds(row: Row) -> str:
    return f"{number(row['latency_ms_mean'] / 1e3)}, {number(row['latency_ms_p99'] / 1e3)}"


def klink_load(rows: list[Row]) -> Cells:
    chosen = [r for r in rows if (r["part"], r.get("costs"), r.get("delays")) == ("load", "mixed", "uniform")]
    return crossed(_present(chosen), ("benchmark", "queries"), "policy", SCHEDULERS, _seconds)


def klink_nodes(rows: list[Row]) -> Cells:
    return crossed(
        _present([r for r in rows if r["part"] == "nodes"]), ("benchmark", "nodes"), "policy", SCHEDULERS, _seconds
    )


def klink_memory(rows: list[Row]) -> Cells:
    chosen = [row | {"MB": f"{row['cap_bytes'] / 1e6:.0f}"} for row in rows if row["part"] == "memory"]
    return crossed(_present(chosen), ("benchmark", "costs", "MB"), "policy", CAPPED, _seconds)


def _present(rows: list[Row]) -> list[Row]:
    """Returns the rows. Raises KeyError, as for a file that lacks a part, if there are none."""
    if not rows:
        raise KeyError("part")
    return rows


def klink_interval(rows: list[Row]) -> Cells:
    names = ("empirical", "normal, as printed", "normal, predictive", "linear regression")
    chosen = _present([r for r in rows if r["part"] == "accuracy" and r["confidence"] in (0.9, 0.95)])
    shown = [[r["delays"], f"{r['confidence']:.0%}", *(f"{r[name]:.1%}" for name in names)] for r in chosen]
    return [["delays", "confidence", *names], *shown]


def klink_overhead(rows: list[Row]) -> Cells:
    chosen = _present([r for r in rows if r["part"] == "overhead"])
    return crossed(chosen, ("queries",), "policy", ("klink", "fair"), lambda row: f"{row['overhead']:.2%}")


def _millions(value: float) -> str:
    return f"{value / 1e6:.2f}"


def by_number(part: str, heading: str) -> Callable[[Row], Cells]:
    """Returns the table of a part whose ways have records/s by a number, such as the number of windows."""

    def cells(document: Row) -> Cells:
        ways = document[part]["2"]
        numbers = list(next(iter(ways.values())))
        return [[heading, *numbers], *([way, *(_millions(at[n]) for n in numbers)] for way, at in ways.items())]

    return cells


def condor_skew(document: Row) -> Cells:
    rates = document["skew"]["2"]
    return [["", "M records/s"], *([name, _millions(rate)] for name, rate in rates.items())]


def condor_accuracy(document: Row) -> Cells:
    rows = document["accuracy"]["2"]
    head = ["", "centralised", "distributed", "size ratio"]
    return [head, *([name, f"{r['centralised']:.2g}", f"{r['distributed']:.2g}", f"{r['size ratio']:.1f}"]
                    for name, r in rows.items())]  # fmt: skip


def condor_evaluation(document: Row) -> Cells:
    by_cores = document["evaluation"]
    head = ["answers/s", *(f"{cores} cores" for cores in by_cores)]
    return [
        head,
        *([mode, *(f"{at[mode]:,.0f}" for at in by_cores.values())] for mode in next(iter(by_cores.values()))),
    ]


def condor_cost(document: Row) -> Cells:
    by_cores = document["cost"]
    first = next(iter(by_cores.values()))
    names = [name.removesuffix(", one thread") for name in first if name.endswith(", one thread")]
    head = ["M records/s", "one thread", *(f"Spark, {cores} cores" for cores in by_cores)]
    return [head, *([name, _millions(first[f"{name}, one thread"]),
                     *(_millions(at[f"{name}, spark"]) for at in by_cores.values())] for name in names)]  # fmt: skip
