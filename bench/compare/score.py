"""The figures of a way's answers, compared with the truth: latency, error and kept promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from bench.compare.ways import TOP, Way
from bench.compare.workload import Workload

DEADLINE_TOLERANCE_S = 0.05
CONFIDENCE = 0.95
SCRIPT_ENTRY_BYTES = 5.7
"""Bytes on the wire of an entry of the exact script."""
Sums = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class WindowAnswer:
    """The answer to one window that a client uses.

    Attributes:
        window: the window's number.
        seen_s: wall time at which a client could see the answer.
        sums: group -> (bytes, downloads), or (value,) of another function; of `top`, ``country,package`` -> (count,).
        states_met: whether the answer says that its contract is met; None: the way states nothing.
        bounds: group -> the stated lower and upper bound, of other functions than sums.
    """

    window: int
    seen_s: float
    sums: Sums
    states_met: bool | None = None
    bounds: Mapping[str, tuple[float, float]] | None = None


def truth(load: Workload, way: Way) -> list[dict[str, tuple[int, int]]]:
    """Returns the true sums by window, for the groups of the way."""
    if way.group_by == ("package", "country"):
        return load.sums
    result = []
    for sums in load.sums:
        totals: dict[str, tuple[int, int]] = {}
        for key, (amount, count) in sums.items():
            country = key.rsplit(",", 1)[1]
            before = totals.get(country, (0, 0))
            totals[country] = before[0] + amount, before[1] + count
        result.append(totals)
    return result


def largest_error(sums: Sums, true: Sums) -> float:
    """Returns the largest error of a group's bytes. A group that the answer lacks counts as 0."""
    keys = sums.keys() | true.keys()
    return max((abs((sums.get(key) or (0.0,))[0] - (true.get(key) or (0.0,))[0]) for key in keys), default=0.0)


def row(way: Way, load: Workload, answers: Mapping[int, WindowAnswer], end_s: Sequence[float]) -> dict[str, Any]:
    """Returns the figures of a way.

    Args:
        answers: by window.
        end_s: wall times of the windows' ends.
    """
    latency = {number: answer.seen_s - end_s[number] for number, answer in answers.items()}
    if way.function == "sum":
        error = _sum_errors(way, load, answers)
        kept = _kept(way, answers, latency, error)
    else:
        true = load.functions[way.function]
        error = {number: function_error(way.function, answer.sums, true[number]) for number, answer in answers.items()}
        kept = sum(_within_bounds(answer, true[number], error[number]) for number, answer in answers.items())
    return {
        "windows": len(answers),
        "p50_s": _quantile(latency, 0.5),
        "p95_s": _quantile(latency, 0.95),
        "worst_error": max(error.values(), default=None),
        "contracts_kept": kept,
        "stated_met": sum(bool(answer.states_met) for answer in answers.values()) if way.kind == "edgewater" else None,
    }


def _sum_errors(way: Way, load: Workload, answers: Mapping[int, WindowAnswer]) -> dict[int, float]:
    """Returns, by window, the largest error of a sum as a share of the largest group."""
    true = truth(load, way)
    by_package = way.group_by == ("package", "country")
    largest = load.largest if by_package else max(amount for sums in true for amount, _ in sums.values())
    return {number: largest_error(answer.sums, true[number]) / largest for number, answer in answers.items()}


def function_error(function: str, found: Sums, true: Mapping[str, float]) -> float:
    """Returns the largest relative error of a group; of `top`, of the counts at each rank, relative to the largest."""
    if function != "top":
        return max((abs(found.get(key, (0.0,))[0] - value) / max(abs(value), 1.0) for key, value in true.items()))
    ranked: dict[str, tuple[list[float], list[float]]] = {}
    for key, value in true.items():
        ranked.setdefault(key.split(",", 1)[0], ([], []))[0].append(value)
    for key, (value, *_) in found.items():
        ranked.setdefault(key.split(",", 1)[0], ([], []))[1].append(value)
    errors = []
    for counts, given in ranked.values():
        best, listed = sorted(counts, reverse=True)[:TOP], sorted(given, reverse=True)[:TOP]
        errors += [abs(value - other) for value, other in zip_longest(best, listed, fillvalue=0.0)]
    return max(errors) / max(true.values())


def _within_bounds(answer: WindowAnswer, true: Mapping[str, float], error: float) -> bool:
    """Returns whether the stated bounds hold for 95 % of the groups, which is their confidence. Without bounds: whether
    there is no error.
    """
    if answer.bounds is None:
        return error == 0.0
    inside = [low <= true.get(key, 0.0) <= high for key, (low, high) in answer.bounds.items()]
    return sum(inside) >= CONFIDENCE * len(inside)


def best_that_fits(load: Workload, capacity_bytes: float | None) -> float | None:
    """Returns the worst error, as in `row`, of the best answers that fit the links; None: the links have no limit.

    Each site sends the groups with its largest sums, once each, as many as `capacity_bytes` hold. This is the best that
    a site can do without the data of other sites.

    Args:
        capacity_bytes: of one link, from the begin of a window to its deadline.
    """
    if capacity_bytes is None:
        return None
    most, missing = int(capacity_bytes / SCRIPT_ENTRY_BYTES), [dict[str, float]() for _ in range(load.windows)]
    for sums in load.site_sums:
        for number, groups in enumerate(sums):
            for key in sorted(groups, key=lambda key: -groups[key])[most:]:
                missing[number][key] = missing[number].get(key, 0.0) + groups[key]
    return max(max(errors.values(), default=0.0) for errors in missing) / load.largest


def _kept(
    way: Way, answers: Mapping[int, WindowAnswer], latency: Mapping[int, float], error: Mapping[int, float]
) -> int | None:
    """Returns in how many windows the way kept its promise; None: it makes no promise."""
    if way.error_share is None and way.deadline_s is None:
        return None
    return sum(
        (way.error_share is None or error[number] <= way.error_share * (1 + 1e-9))
        and (way.deadline_s is None or latency[number] <= way.deadline_s + DEADLINE_TOLERANCE_S)
        for number in answers
    )


def _quantile(values: Mapping[int, float], rank: float) -> float | None:
    return float(np.quantile(list(values.values()), rank)) if values else None
