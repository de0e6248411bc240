"""The goals, judged on the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bench.scheduling.cells import CONFIDENCES, REDUCTION, WITHOUT, Row

TAIL_SHARE = 0.25
WORSE = 1.05
OVERHEAD = 0.005
POINT = 0.01


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Returns one line per goal that the rows can judge."""
    return [*_tail(rows), *_overload(rows), *_memory(rows), *_accuracy(rows), *_overhead(rows)]


def _groups(rows: Sequence[Row], part: str) -> Iterator[dict[str, Row]]:
    keys = ("benchmark", "delays", "costs", "queries", "nodes", "cap_bytes")
    groups: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == part and row["latency_ms_p99"] is not None:
            groups.setdefault(tuple(row[key] for key in keys), {})[row["policy"]] = row
    yield from groups.values()


def _where(row: Row) -> str:
    cap = "" if row["cap_bytes"] is None else f", {row['cap_bytes'] / 1e6:.0f} MB"
    return f"{row['benchmark']}, {row['delays']}, {row['costs']}, {row['load']:.0%}{cap}"


def _tail(rows: Sequence[Row]) -> Iterator[str]:
    at = [g for g in _groups(rows, "load") if {"klink", "fair"} <= g.keys() and 0.93 < g["klink"]["load"] < 0.95]
    if at:
        ratio, row = max(((g["klink"]["latency_ms_p99"] / g["fair"]["latency_ms_p99"], g["klink"]) for g in at),
                         key=lambda each: each[0])  # fmt: skip
        yield _line(ratio <= TAIL_SHARE, f"p99 at 94 %: at most {ratio:.1%} of fair's ({_where(row)})")


def _overload(rows: Sequence[Row]) -> Iterator[str]:
    for part in ("load", "memory"):
        worst, shown = 0.0, ""
        for group in _groups(rows, part):
            if "klink" not in group or group["klink"]["load"] <= 1:
                continue
            ours = group["klink"]
            for name, other in group.items():
                if name in ("klink", WITHOUT, REDUCTION):
                    continue
                both = min(ours[f] / other[f] for f in ("latency_ms_mean", "latency_ms_p99"))
                if both > worst:
                    worst, shown = both, f"{name}: {_where(ours)}"
        if shown:
            yield _line(
                worst <= WORSE,
                f"past overload ({part}): in mean and p99 at most {worst - 1:+.1%} of a baseline's ({shown})",
            )


def _memory(rows: Sequence[Row]) -> Iterator[str]:
    capped = [r for r in rows if r["part"] == "memory"]
    if capped:
        full = max(r["memory_peak"] / r["cap_bytes"] for r in capped)
        yield _line(full <= 1, f"memory: at most {full:.2%} of the cap, over {len(capped)} rows")


def _accuracy(rows: Sequence[Row]) -> Iterator[str]:
    found = [r for r in rows if r["part"] == "accuracy" and r["confidence"] in CONFIDENCES]
    if found:
        off = max(abs(r["empirical"] - r["confidence"]) for r in found)
        yield _line(off <= POINT, f"ingestion interval: at most {100 * off:.2f} points off its confidence")


def _overhead(rows: Sequence[Row]) -> Iterator[str]:
    ours = [r["overhead"] for r in rows if r["part"] == "overhead" and r["policy"] == "klink"]
    if ours:
        yield _line(max(ours) <= OVERHEAD, f"scheduler: at most {max(ours):.2%} of the queries' CPU")


def _line(kept: bool, text: str) -> str:
    assert not math.isnan(kept)
    return f"{'kept' if kept else 'MISSED'}: {text}"
