"""Sketches and exact aggregates: intervals at the requested confidence, at the sketch's own, and certain bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.truth.cases import CONFIDENCES, Case, Tallies
from bench.truth.data import EDGES, NUMBERS, three_edges, zipf
from bench.truth.samples import groups_at_a_time, note
from edgewater.synopses import (
    Distinct,
    Estimates,
    FloatArray,
    Frequency,
    HaarWavelet,
    IntersectionSize,
    JoinSize,
    KllStack,
    MaxErrorWavelet,
    Maximum,
    Mean,
    Minimum,
    Point,
    Quantile,
    Question,
    Range,
    RangeSum,
    Rank,
    SelfJoinSize,
    Sum,
    UnionSize,
    Variance,
)
from edgewater.synopses.distinct.hyperloglog import HyperLogLogStack
from edgewater.synopses.exact.aggregates import FloatSumStack, MeanStack, VarianceStack
from edgewater.synopses.frequency.count_min import CountMinStack
from edgewater.synopses.frequency.fast_agms import FastAgmsStack
from edgewater.synopses.frequency.top_k import TopKStack
from edgewater.synopses.histograms.equi_depth import EquiDepthStack
from edgewater.synopses.histograms.equi_width import EquiWidthStack
from edgewater.synopses.membership.bloom import BloomStack
from edgewater.synopses.membership.cuckoo import CuckooStack
from edgewater.synopses.quantiles.ddsketch import DDSketchStack

RECORDS = 3000

Asked = Iterator[tuple[str, Question, FloatArray]]
_ITEMS = {
    "all different": lambda rng, shape: rng.permuted(np.tile(np.arange(shape[1]), (shape[0], 1)), axis=1),
    "Zipf 1.1": zipf,
    "few items and a tail": lambda rng, shape: np.where(
        rng.random(shape) < 0.5, rng.integers(0, 10, shape), np.arange(shape[1]) + 100
    ),
}
_DISTINCT = (10, 300, 3000, 60_000)


def cases() -> Iterator[Case]:
    for data in (*NUMBERS, EDGES):
        few = 5 if data == EDGES else 0
        yield Case(f"quantiles {data}", data, "steady", "estimator", partial(_numbers, data), smoke=few)
        yield Case(f"wavelets {data}", data, "steady", "estimator", partial(_wavelets, data), smoke=few)
    for data in _ITEMS:
        yield Case(f"frequencies {data}", data, "steady", "estimator", partial(_frequencies, data), smoke=2)
    for items in _DISTINCT:
        few = 2 if items < 1000 else 0
        yield Case(f"distinct {items}", f"{items} items", "steady", "estimator", partial(_distinct, items), smoke=few)


def _ask(tallies: Tallies, kind: str, query: Callable[[Question], Estimates], asked: Asked) -> None:
    """Asks at every confidence. A synopsis with its own confidence is asked once."""
    for name, question, truth in asked:
        if "confidence" in type(question).__dataclass_fields__ and query(question).confidence < 1:
            for confidence in CONFIDENCES:
                answer = query(replace(question, confidence=confidence))  # type: ignore[call-arg]
                # A sketch with its own confidence gives the same answer to all confidences.
                note(tallies, f"{kind} {name}", round(answer.confidence, 4), answer, truth)
                if answer.confidence != confidence:
                    break
        else:
            answer = query(question)
            note(tallies, f"{kind} {name}", answer.confidence, answer, truth)


def _merged(make: Callable[[], Any], parts: list[Any]) -> Any:
    """Returns a stack of the values of each edge, shape (groups, records), merged."""
    result: Any = None
    for source, values in enumerate(parts, 1):
        stack = make()
        if hasattr(stack, "source"):
            stack.source = source
        stack.grow(len(values))
        stack.update(np.repeat(np.arange(len(values)), values.shape[1]), values.reshape(-1))
        if result is None:
            result = stack
        else:
            result.merge(stack, np.arange(len(values)))
    return result


def _numbers(data: str, seed: int, trials: int) -> Tallies:
    rng, tallies = np.random.default_rng([seed, 7]), Tallies()
    for groups in groups_at_a_time(trials):
        shape = (groups, RECORDS)
        parts = three_edges(rng, shape) if data == EDGES else [NUMBERS[data](rng, shape)]
        values = np.concatenate(parts, axis=1)
        held, n = np.sort(values, axis=1), values.shape[1]
        low, high = np.quantile(values[0], [0.3, 0.9]).tolist()
        inside = ((values >= low) & (values <= high)).sum(axis=1).astype(float)
        ranks: list[Any] = [(f"quantile {q}", Quantile(q), held[:, int(q * (n - 1))]) for q in (0.01, 0.5, 0.99)]
        ranks.append(("rank", Rank(high), (values <= high).mean(axis=1)))
        ends = [("min", Minimum(), held[:, 0]), ("max", Maximum(), held[:, -1])]
        sums = np.array([math.fsum(row) for row in values.tolist()])
        total = ("sum", Sum(), sums)
        # The nearest float64 of the exact sum, divided; and two passes over values that are exactly 0 if all are equal.
        mean = ("mean", Mean(), sums / n)
        variance = ("variance", Variance(), (values - values[:, :1]).var(axis=1, ddof=1))
        hashed = int(rng.integers(1 << 62))
        _ask(tallies, "kll", _merged(partial(KllStack, k=64, seed=hashed), parts).query, iter([*ranks, *ends]))
        _ask(tallies, "ddsketch", _merged(DDSketchStack, parts).query, iter([*ranks, *ends, total, mean]))
        depth = _merged(partial(EquiDepthStack, buckets=32), parts)
        _ask(tallies, "equi_depth", depth.query, iter([*ranks, ("range", Range(low, high), inside)]))
        width = _merged(partial(EquiWidthStack, low=-5.0, high=5.0, bins=64), parts)
        _ask(tallies, "equi_width", width.query, iter([*ranks, ("range", Range(low, high), inside)]))
        for name, make, truth in (
            ("sum", FloatSumStack, total), ("mean", MeanStack, mean), ("var", VarianceStack, variance),
        ):  # fmt: skip
            answer = _merged(make, parts).query(truth[1])
            rounding = np.zeros(groups) if answer.rounding is None else answer.rounding
            answer = replace(answer, lower=answer.lower - rounding, upper=answer.upper + rounding)
            note(tallies, f"exact {name}", 1.0, answer, truth[2])
    return tallies


def _frequencies(data: str, seed: int, trials: int) -> Tallies:
    """Asks one sketch at a time: groups of one stack would share the positions of their items."""
    rng, tallies = np.random.default_rng([seed, 8]), Tallies()
    for _ in range(trials):
        numbers, other = (_ITEMS[data](rng, (1, RECORDS)) for _ in range(2))
        (one, two), hashed = (
            (np.unique(rows, return_counts=True) for rows in (numbers, other)),
            int(rng.integers(1 << 62)),
        )
        _, mine, theirs = np.intersect1d(one[0], two[0], assume_unique=True, return_indices=True)
        join = float((one[1][mine].astype(float) * two[1][theirs]).sum())
        asked: list[Any] = [
            (f"frequency, {name}", Frequency(item), (numbers == item).sum(axis=1).astype(float))
            for name, item in (("frequent", 1), ("rare", 1500), ("absent", -5))
        ]
        joins: list[tuple[str, Any, Any]] = [
            ("self join", SelfJoinSize(), np.array([float((one[1].astype(float) ** 2).sum())]))
        ]
        parts = np.split(numbers, 3, axis=1)
        agms = partial(FastAgmsStack, width=256, depth=5, seed=hashed)
        joins.append(("join", JoinSize(_merged(agms, [other])), np.array([join])))
        for kind, make in (
            ("count_min", partial(CountMinStack, width=256, depth=3, seed=hashed)),
            ("top_k", partial(TopKStack, k=10, seed=hashed)),
            ("fast_agms", agms),
        ):
            _ask(tallies, kind, _merged(make, parts).query, iter([*joins, *asked] if kind == "fast_agms" else asked))
    return tallies


def _distinct(items: int, seed: int, trials: int) -> Tallies:
    rng, tallies = np.random.default_rng([seed, 9]), Tallies()
    for groups in groups_at_a_time(trials):
        # Every value twice, at different edges; half of the values also in the other synopsis.
        base = rng.integers(0, 1 << 62, (groups, 1)) + np.arange(items)
        other = base + items // 2
        parts = [base, base[:, ::2]]
        truth, half = np.full(groups, float(items)), items - items // 2
        union, both = np.full(groups, float(items + items // 2)), np.full(groups, float(half))
        hashed = int(rng.integers(1 << 62))
        kinds: dict[str, Callable[[], Any]] = {
            "hyperloglog 2^10": partial(HyperLogLogStack, precision=10, seed=hashed),
            "bloom 2^14": partial(BloomStack, bits=1 << 14, hashes=4, seed=hashed),
            "cuckoo 2^12": partial(CuckooStack, buckets=1 << 12, seed=hashed),
        }
        for kind, make in kinds.items():
            if items > 10_000 and not kind.startswith("hyper"):
                continue
            stack = _merged(make, parts)
            asked: list[Any] = [("distinct", Distinct(), truth)]
            if kind.startswith("bloom"):
                second = _merged(make, [other])
                asked += [("union", UnionSize(second), union), ("intersection", IntersectionSize(second), both)]
            _ask(tallies, kind, stack.query, iter(asked))
    return tallies


def _wavelets(data: str, seed: int, trials: int) -> Tallies:
    """Asks one signal at a time, with 50 questions."""
    rng, tallies = np.random.default_rng([seed, 10]), Tallies()
    for _ in range(max(trials // 50, 1)):
        parts = three_edges(rng, (1, RECORDS)) if data == EDGES else [NUMBERS[data](rng, (1, RECORDS))]
        signal = np.concatenate(parts, axis=1)[0]
        for kind, make in (("haar", HaarWavelet), ("haar_max", MaxErrorWavelet)):
            wavelet = make(64)
            wavelet.update(signal)
            for _ in range(50):
                first, last = np.sort(rng.integers(0, len(signal), 2)).tolist()
                asked = [("point", Point(first), signal[first]),
                         ("range sum", RangeSum(first, last), math.fsum(signal[first : last + 1]))]  # fmt: skip
                for name, question, truth in asked:
                    answer = wavelet.query(question)
                    value, lower, upper = (np.array([b]) for b in (answer.value, answer.lower, answer.upper))
                    stated = Estimates(value, lower, upper, answer.confidence)
                    note(tallies, f"{kind} {name}", answer.confidence, stated, np.array([truth]))
    return tallies
