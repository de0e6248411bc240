"""Samples: every question with a stated interval, on every population of `bench.truth.data`.

A trial is a group of one stack, so that thousands of trials are a few calls. Groups differ in their values and tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.truth.cases import CONFIDENCES, Case, Tallies, Tally
from bench.truth.data import EDGES, NUMBERS, three_edges
from center.early import estimate_function
from edgewater.synopses import (
    Count,
    Estimates,
    FloatArray,
    Mean,
    Proportion,
    Quantile,
    Question,
    Rank,
    SubsetCount,
    Sum,
    function_named,
)
from edgewater.synopses.sampling.bernoulli import BernoulliStack
from edgewater.synopses.sampling.biased_reservoir import BiasedReservoirStack
from edgewater.synopses.sampling.reservoir import ReservoirStack

SIZES = (20, 50, 200, 1000)
_BERNOULLI = (20, 200)
_SLOTS = (64, 1000)
RECORDS = 5000
_AT_A_TIME = 50  # number of groups

Truth = tuple[str, Question, FloatArray]


def cases() -> Iterator[Case]:
    for data in (*NUMBERS, EDGES):
        for size in SIZES:
            few = 5 if data == EDGES and size == SIZES[0] else 0
            yield Case(f"reservoir {size} {data}", f"{data}, n = {size}", "steady", "estimator",
                       partial(_reservoir, data, size), smoke=few)  # fmt: skip
            if size in _BERNOULLI:
                yield Case(f"bernoulli {size} {data}", f"{data}, n = {size}", "steady", "estimator",
                           partial(_bernoulli, data, size), smoke=few)  # fmt: skip
            yield Case(f"function {size} {data}", f"{data}, n = {size}", "steady", "estimator",
                       partial(_function, data, size), smoke=few)  # fmt: skip
        # Samples of a quarter of the records, of most, and of all.
        for size in (5, 18, 30):
            yield Case(f"reservoir {size} of 21 {data}", f"{data}, n = {size} of 21", "steady", "estimator",
                       partial(_reservoir, data, size, records=21), smoke=0)  # fmt: skip
        for size in _SLOTS:
            few = 5 if data == EDGES and size == _SLOTS[0] else 0
            yield Case(f"biased {size} {data}", f"{data}, {size} slots", "steady", "estimator",
                       partial(_biased, data, size), smoke=few)  # fmt: skip


def note(tallies: Tallies, measure: str, confidence: float, answer: Estimates, truth: FloatArray) -> None:
    """Counts an answer per group."""
    tally = tallies.setdefault((measure, confidence), Tally())
    # A sum in another order is rounded differently.
    slack = 1e-9 * np.abs(truth)
    low = np.where(np.isnan(answer.lower), -np.inf, answer.lower)
    high = np.where(np.isnan(answer.upper), np.inf, answer.upper)
    stated = np.isfinite(low) | np.isfinite(high)
    tally.trials += len(truth)
    tally.stated += int(stated.sum())
    tally.held += int((stated & (low - slack <= truth) & (truth <= high + slack)).sum())


def groups_at_a_time(trials: int) -> Iterator[int]:
    for at in range(0, trials, _AT_A_TIME):
        yield min(_AT_A_TIME, trials - at)


def updated(stack: Any, parts: Sequence[FloatArray]) -> Any:
    """Returns the stack with the values of each edge, shape (groups, records), merged."""
    for source, part in enumerate(parts, 1):
        edge = type(stack)(**stack.parameters, source=source, seed=stack.seed)
        edge.grow(len(part))
        edge.update(np.repeat(np.arange(len(part)), part.shape[1]), part.reshape(-1))
        stack.grow(len(part))
        stack.merge(edge, np.arange(len(part)))
    return stack


def truths(values: FloatArray) -> Iterator[Truth]:
    """Yields questions, whose confidence is set later, with the true answer per group."""
    held = np.sort(values, axis=1)
    n = values.shape[1]
    yield "mean", Mean(), values.mean(axis=1)
    yield "sum", Sum(), values.sum(axis=1)
    yield "count", Count(), np.full(len(values), float(n))
    for q in (0.5, 0.99):
        yield f"quantile {q}", Quantile(q), held[:, int(q * (n - 1))]
    low, high = np.quantile(values[0], [0.9, 0.97]).tolist()
    inside = ((values >= low) & (values <= high)).mean(axis=1)
    yield "proportion", Proportion(low, high), inside
    yield "range", SubsetCount(low, high), inside * n
    yield "rank", Rank(low), (values <= low).mean(axis=1)


def _parts(data: str, rng: np.random.Generator, groups: int, records: int) -> list[FloatArray]:
    return three_edges(rng, (groups, records)) if data == EDGES else [NUMBERS[data](rng, (groups, records))]


def _ask(tallies: Tallies, kind: str, query: Callable[[Question], Estimates], asked: Iterator[Truth]) -> None:
    for name, question, truth in asked:
        for confidence in CONFIDENCES:
            note(tallies, f"{kind} {name}", confidence, query(replace(question, confidence=confidence)), truth)  # type: ignore[call-arg]


def _reservoir(data: str, size: int, seed: int, trials: int, records: int = RECORDS) -> Tallies:
    rng, tallies = np.random.default_rng([seed, size, records]), Tallies()
    for groups in groups_at_a_time(trials):
        parts = _parts(data, rng, groups, records)
        values = np.concatenate(parts, axis=1)
        stack = updated(ReservoirStack(size=size, seed=int(rng.integers(1 << 62))), parts)
        _ask(tallies, "reservoir", stack.query, truths(values))
    return tallies


def _bernoulli(data: str, size: int, seed: int, trials: int) -> Tallies:
    rng, tallies = np.random.default_rng([seed, size]), Tallies()
    for groups in groups_at_a_time(trials):
        parts = _parts(data, rng, groups, RECORDS)
        stack = updated(BernoulliStack(rate=size / RECORDS, seed=int(rng.integers(1 << 62))), parts)
        _ask(tallies, "bernoulli", stack.query, truths(np.concatenate(parts, axis=1)))
    return tallies


def _biased(data: str, size: int, seed: int, trials: int) -> Tallies:
    rng, tallies = np.random.default_rng([seed, size, 1]), Tallies()
    for groups in groups_at_a_time(trials):
        parts = _parts(data, rng, groups, 12 * size)
        values = np.concatenate(parts, axis=1)
        # Records of edges come in turns.
        values = rng.permuted(values, axis=1)
        times = np.arange(values.shape[1])
        stack = BiasedReservoirStack(groups, size=size, source=1, seed=int(rng.integers(1 << 62)))
        stack.update(np.repeat(np.arange(groups), values.shape[1]), values.reshape(-1), times=np.tile(times, groups))
        age = (1 - 1 / size) ** np.arange(values.shape[1])[::-1]
        weighted = (values * age).sum(axis=1) / age.sum()
        for confidence in CONFIDENCES:
            note(tallies, "biased mean", confidence, stack.query(Mean(confidence)), weighted)
    return tallies


def _function(data: str, size: int, seed: int, trials: int) -> Tallies:
    """Evaluates the quantile function on sampled rows, as the center does."""
    rng, tallies = np.random.default_rng([seed, size, 3]), Tallies()
    function = function_named("exact_quantile")
    assert function is not None and function.sample is not None
    rate = size / RECORDS
    for _ in range(trials):
        values = np.concatenate(_parts(data, rng, 1, RECORDS), axis=1)[0]
        rows = values[rng.random(len(values)) < rate][:, None]
        if not len(rows):
            continue
        for q in (0.5, 0.99):
            truth = np.quantile(values, [q], method="inverted_cdf")
            for confidence in CONFIDENCES:
                found = estimate_function(function.sample, {"q": q}, rows, rate, rng, confidence=confidence)
                answer = Estimates(found.value, found.lower, found.upper, confidence)
                note(tallies, f"exact_quantile {q}", confidence, answer, truth)
    return tallies
