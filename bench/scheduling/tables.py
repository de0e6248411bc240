"""Markdown tables of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.scheduling.cells import Row

KEYS = ("benchmark", "delays", "costs")


def markdown(part: str, rows: Sequence[Row]) -> str:
    return "\n".join(_TABLES[part](rows)) + "\n"


def _pair(row: Row) -> str:
    return f"{row['latency_ms_mean'] / 1e3:.3g} / {row['latency_ms_p99'] / 1e3:.3g}"


def _crossed(rows: Sequence[Row], down: Callable[[Row], str], cell: Callable[[Row], str], head: str) -> list[str]:
    policies = list(dict.fromkeys(r["policy"] for r in rows))
    lines = [f"| {head} | {' | '.join(policies)} |", "|" + "---|" * (len(policies) + 1)]
    for name in dict.fromkeys(map(down, rows)):
        here = {r["policy"]: r for r in rows if down(r) == name}
        lines.append(f"| {name} | {' | '.join(cell(here[p]) if p in here else '' for p in policies)} |")
    return lines


def _load(rows: Sequence[Row]) -> list[str]:
    lines = []
    for key in dict.fromkeys(tuple(r[k] for k in KEYS) for r in rows):
        here = [r for r in rows if tuple(r[k] for k in KEYS) == key]
        for title, cell in (
            ("s from the watermark's arrival, mean / p99", _pair),
            ("s, p90", lambda r: f"{r['latency_ms_p90'] / 1e3:.3g}"),
            ("s from the window's end, mean / p99",
             lambda r: f"{r['window_ms_mean'] / 1e3:.3g} / {r['window_ms_p99'] / 1e3:.3g}"),
            ("thousand records/s; slowdown", lambda r: f"{r['throughput'] / 1e3:.0f}; {r['slowdown']:.3g}"),
        ):  # fmt: skip
            lines += ["", f"**{', '.join(key)}: {title}**", ""]
            lines += _crossed(here, lambda r: f"{r['queries']} ({r['load']:.0%})", cell, "queries")
    return lines


def _nodes(rows: Sequence[Row]) -> list[str]:
    return _crossed(
        rows, lambda r: f"{r['benchmark']}, {r['nodes']} ({r['load']:.0%})", _pair, "nodes (load): s, mean / p99"
    )


def _memory(rows: Sequence[Row]) -> list[str]:
    return _crossed(
        rows,
        lambda r: f"{r['benchmark']}, {r['costs']}, {r['cap_bytes'] / 1e6:.0f} MB",
        _pair,
        "110 %, cap: s, mean / p99",
    )


def _cycles(rows: Sequence[Row]) -> list[str]:
    return ["| cycle, ms | s, mean / p99 |", "|---|---|", *(f"| {r['cycle_ms']:g} | {_pair(r)} |" for r in rows)]


def _accuracy(rows: Sequence[Row]) -> list[str]:
    names = ("empirical", "normal, predictive", "normal, as printed", "linear regression")
    lines = [f"| delays | confidence | {' | '.join(names)} | mean width, ms |", "|" + "---|" * 7]
    return lines + [
        f"| {r['delays']} | {r['confidence']:.0%} | {' | '.join(f'{r[n]:.1%}' for n in names)} | {r['width_ms']:.0f} |"
        for r in rows
    ]


def _overhead(rows: Sequence[Row]) -> list[str]:
    return _crossed(rows, lambda r: f"{r['queries']} ({r['load']:.0%})", lambda r: f"{r['overhead']:.2%}", "queries")


def _center(rows: Sequence[Row]) -> list[str]:
    def case(row: Row) -> str:
        return f"{row['load']:.0%}" + (f", down for {row['down_s']} s" if row["down_s"] else "")

    def figures(row: Row) -> str:
        return " / ".join(f"{row[f'latency_ms_{name}'] / 1e3:.3g}" for name in ("mean", "p90", "p99"))

    return _crossed(rows, case, figures, "load: s, mean / p90 / p99")


def _core(rows: Sequence[Row]) -> list[str]:
    lines = ["| queries | records a batch | CPU, µs per record | two threads |", "|---|---|---|---|"]
    return lines + [
        f"| {r['queries']}, {r['workload']} | {r['batch']:,} | {r['us']:.2f} | {r['second_core']:.2f} |" for r in rows
    ]


_TABLES = {
    "load": _load,
    "nodes": _nodes,
    "memory": _memory,
    "cycles": _cycles,
    "accuracy": _accuracy,
    "overhead": _overhead,
    "center": _center,
    "core": _core,
}
