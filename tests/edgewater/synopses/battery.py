"""The subjects and the zoo of data sets that `test_battery.py` puts every registered stack through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.streams import COLUMN_TYPES
from edgewater.synopses import (
    Contains,
    Count,
    Distinct,
    FalsePositiveRate,
    Frequency,
    IntersectionSize,
    JoinSize,
    Maximum,
    Mean,
    Minimum,
    Proportion,
    Quantile,
    Question,
    Range,
    Rank,
    SelfJoinSize,
    Since,
    SubsetCount,
    Sum,
    UnionSize,
    Variance,
    codec,
)
from edgewater.synopses.base import Stack
from edgewater.synopses.bernoulli import BernoulliStack
from edgewater.synopses.biased_reservoir import BiasedReservoirStack
from edgewater.synopses.bloom import BloomStack
from edgewater.synopses.count_min import CountMinStack
from edgewater.synopses.cuckoo import CountingCuckooStack, CuckooStack
from edgewater.synopses.equi_depth import EquiDepthStack
from edgewater.synopses.equi_width import EquiWidthStack
from edgewater.synopses.fast_agms import FastAgmsStack
from edgewater.synopses.fifo import FifoStack
from edgewater.synopses.hashing import hash_values
from edgewater.synopses.items import ITEM_TYPES
from edgewater.synopses.kll import KllStack
from edgewater.synopses.registry import function_named, function_names, stack_from_message
from edgewater.synopses.reservoir import ReservoirStack
from edgewater.synopses.sample_rows import SampleStack
from edgewater.synopses.top_k import TopKStack

SEED = 20240607

QUESTIONS: dict[type[Question], tuple[Question, ...]] = {
    Count: (Count(),),
    Sum: (Sum(),),
    Mean: (Mean(),),
    Variance: (Variance(),),
    Minimum: (Minimum(),),
    Maximum: (Maximum(),),
    Distinct: (Distinct(), Distinct(0.5), Distinct(0.999)),
    Quantile: tuple(Quantile(q) for q in (0.0, 0.01, 0.5, 0.9, 0.999, 1.0)),
    Rank: tuple(Rank(x) for x in (-1e9, -1.0, 0.0, 0.5, 3.0, 1e9)),
    SelfJoinSize: (SelfJoinSize(), SelfJoinSize(0.99)),
    FalsePositiveRate: (FalsePositiveRate(),),
    Range: (Range(-1e9, 1e9), Range(-2.0, 0.7), Range(0.0, 0.0), Range(-np.inf, np.inf), Range(1.0, -1.0)),
    Proportion: (Proportion(-1.0, 2.0), Proportion(0.0, 0.0, 0.99)),
    SubsetCount: (SubsetCount(-1.0, 2.0), SubsetCount(5.0, 1e200, 0.5)),
    Since: (Since(0, Count()), Since(1 << 22, Sum()), Since(1 << 22, Mean(0.99))),
}

ITEMS: dict[str, tuple[Any, ...]] = {
    "string": ("one", "", "日本", "user-7", "not there"),
    "int64": (7, 0, -3, 1 << 60),
    "float64": (2.5, 0.0, np.nan, -1.0, 1e-9),
    "bool": (True, False),
}

ABOUT_ITEMS: dict[type[Question], Callable[[Any], Question]] = {Frequency: Frequency, Contains: Contains}
ABOUT_TWO: dict[type[Question], Callable[[Any], Question]] = {
    JoinSize: JoinSize,
    UnionSize: UnionSize,
    IntersectionSize: IntersectionSize,
}

FLOAT_STATE = {"float_sum", "mean", "variance", "ddsketch", "equi_depth"}
"""Kinds whose state has float64 sums: equal to rounding only, while all others are equal to the bit."""

BOUNDED_STATE = {"top_k", "kll"}
"""Kinds that order changes within their certain bounds only: intervals of the same values have to meet."""


@dataclass(frozen=True)
class Subject:
    name: str
    make: Callable[[], Stack]
    type: str


def subjects() -> list[Subject]:
    """Every function of the registry, with every type of argument and several parameters."""
    found = []
    variants: dict[str, tuple[dict[str, Any], ...]] = {
        "distinct": ({}, {"precision": 4}, {"precision": 11}),
        "quantiles": ({}, {"accuracy": 0.001}, {"accuracy": 0.2}),
    }
    for name in function_names():
        function = function_named(name)
        assert function is not None
        for given in variants.get(name, ({},)):
            parameters = function.read_parameters([], given, "measures.m")
            for type_ in function.types:
                label = f"{name}({type_}{''.join(f', {k}={v}' for k, v in given.items())})"
                make = function.make
                found.append(Subject(label, lambda m=make, p=parameters, t=type_: m(p, COLUMN_TYPES[t]), type_))
    return found + stacks_without_a_function() + samples_and_histograms()


def stacks_without_a_function() -> list[Subject]:
    """Kinds that no function makes, with small parameters."""
    kinds: tuple[tuple[type[Any], dict[str, int]], ...] = (
        (CountMinStack, {"width": 64, "depth": 3}),
        (CountMinStack, {"width": 32, "depth": 1}),
        (FastAgmsStack, {"width": 64, "depth": 3}),
        (BloomStack, {"bits": 1024, "hashes": 3}),
        (BloomStack, {"bits": 128, "hashes": 9}),
        (CuckooStack, {"buckets": 512}),
        (CuckooStack, {"buckets": 4}),
        (CountingCuckooStack, {"buckets": 256}),
        (CountingCuckooStack, {"buckets": 1}),
        (TopKStack, {"k": 10, "capacity": 50}),
        (TopKStack, {"k": 2, "capacity": 3}),
    )
    return [
        Subject(
            f"{kind.kind}({type_}{''.join(f', {k}={v}' for k, v in given.items())})",
            lambda k=kind, p=given, t=type_: k(item_type=t, **p),
            type_,
        )
        for kind, given in kinds
        for type_ in ITEM_TYPES
    ]


def samples_and_histograms() -> list[Subject]:
    kinds: tuple[tuple[type[Any], dict[str, Any], tuple[str, ...]], ...] = (
        (ReservoirStack, {"size": 50}, ("int64", "float64", "bool")),
        (ReservoirStack, {"size": 3}, ("float64",)),
        (BernoulliStack, {"rate": 0.5}, ("int64", "float64", "bool")),
        (BernoulliStack, {"rate": 1.0, "limit": 30}, ("float64",)),
        (FifoStack, {"size": 50}, ("int64", "float64", "bool")),
        (FifoStack, {"size": 2}, ("float64",)),
        (BiasedReservoirStack, {"size": 64}, ("int64", "float64", "bool")),
        (BiasedReservoirStack, {"size": 2}, ("float64",)),
        (EquiWidthStack, {"low": -10, "high": 10.5, "bins": 64}, ("int64", "float64")),
        (EquiWidthStack, {"low": 0, "high": 1e-300, "bins": 2}, ("float64",)),
        (EquiDepthStack, {"buckets": 5, "accuracy": 0.02}, ("int64", "float64")),
        (KllStack, {"k": 16}, ("int64", "float64")),
    )
    return [
        Subject(
            f"{kind.kind}({type_}{''.join(f', {k}={v}' for k, v in given.items())})",
            partial(kind, **given, **({"item_type": type_} if issubclass(kind, SampleStack) else {})),
            type_,
        )
        for kind, given, types in kinds
        for type_ in types
    ]


def zoo(type_: str) -> dict[str, Any]:
    """Data sets of one column type, as stacks receive them: NumPy, or Arrow for strings."""
    rng = np.random.default_rng(SEED)
    if type_ == "bool":
        return {"one": np.array([True]), "mixed": rng.random(500) < 0.3, "all false": np.zeros(50, bool)}
    if type_ == "string":
        words = ["", "a", "a\0", "ä", "日本", "x" * 7, "x" * 8, "x" * 9, "long " * 100, "/index.html"]
        return {
            "one": pa.array(["one"]),
            "words": pa.array([words[i] for i in rng.integers(0, len(words), 700)]),
            "ids": pa.array([f"user-{i}" for i in rng.integers(0, 5000, 3000)]),
        }
    if type_ == "int64":
        return {
            "one": np.array([7]),
            "zeros": np.zeros(20, np.int64),
            "small": rng.integers(0, 10, 500),
            "signed": rng.integers(-1000, 1000, 3000),
            "huge": rng.integers(-(1 << 50), 1 << 50, 400),
        }
    special = np.array([0.0, -0.0, 1.0, -1.0, 5e-324, -2.5e-308, 1e300, -1e300, 0.1])
    return {
        "one": np.array([2.5]),
        "negative": -rng.lognormal(0, 2, 300),
        "lognormal": rng.lognormal(0, 1, 3000),
        "special": rng.choice(special, 200),
        "wide": 10 ** rng.uniform(-200, 140, 4000),
        "with NaN": np.where(rng.random(300) < 0.2, np.nan, rng.normal(0, 5, 300)),
        "all NaN": np.full(5, np.nan),
        "with infinity": np.concatenate([rng.normal(0, 1, 50), [np.inf, np.inf]]),
    }


def codes_for(values: Any, groups: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, groups, len(values))


def filled(subject: Subject, codes: np.ndarray, values: Any, groups: int) -> Stack:
    stack = subject.make()
    stack.grow(groups)
    add(stack, codes, values)
    return stack


def add(stack: Any, codes: np.ndarray, values: Any) -> None:
    """Updates a stack. Samples are told which record is which, or the order of arrival would decide."""
    if isinstance(stack, SampleStack):
        ids = (hash_values(values) >> np.uint64(1)).astype(np.int64)
        stack.update(codes, values, times=ids // 2**40, ids=ids)
    else:
        stack.update(codes, values)


def pick(values: Any, at: np.ndarray) -> Any:
    return values.take(pa.array(at)) if isinstance(values, pa.Array) else values[at]


def merged(subject: Subject, parts: list[Stack], groups: int) -> Stack:
    """All parts into an empty stack, one after the other."""
    stack = subject.make()
    stack.grow(groups)
    for part in parts:
        stack.merge(part, np.arange(len(part)))
    return stack


def to_bytes(stack: Stack) -> bytes:
    return codec.seal(stack.to_message())


def read(data: bytes) -> Stack:
    return stack_from_message(codec.unseal(data))


def answers(stack: Stack) -> dict[str, np.ndarray]:
    result = {}
    for kind in stack.questions:
        for question in questions_of(kind, stack):
            given = stack.query(question)
            name = kind.__name__ if kind in ABOUT_TWO else repr(question)
            result[name] = np.stack([given.value, given.lower, given.upper])
    return result


def questions_of(kind: type[Question], stack: Any) -> tuple[Question, ...]:
    if kind in ABOUT_ITEMS:
        return tuple(ABOUT_ITEMS[kind](item) for item in ITEMS[stack.item_type])
    return (ABOUT_TWO[kind](stack),) if kind in ABOUT_TWO else QUESTIONS[kind]


def assert_same(left: Stack, right: Stack, scale: float = 0.0) -> None:
    """Equal to the bit; where the state has float sums, to their rounding; or within what its bounds allow.

    Args:
        scale: sum of the absolute values that went in.
    """
    assert len(left) == len(right)
    if left.kind not in FLOAT_STATE | BOUNDED_STATE:
        assert to_bytes(left) == to_bytes(right)
        return
    mine, theirs = answers(left), answers(right)
    assert mine.keys() == theirs.keys()
    if left.kind in BOUNDED_STATE:
        for name, (_, lower, upper) in mine.items():
            assert not (np.maximum(lower, theirs[name][1]) > np.minimum(upper, theirs[name][2])).any(), name
        return
    for name, given in mine.items():
        # M2 cancels from squares of the values; all else from the values.
        slack = 1e-12 * (scale * scale if name.startswith("Variance") else scale)
        np.testing.assert_allclose(given, theirs[name], rtol=1e-9, atol=slack, err_msg=name)


def scale_of(values: Any) -> float:
    if isinstance(values, pa.Array):
        return 0.0
    with np.errstate(over="ignore"):
        finite = np.abs(values[np.isfinite(values)].astype(np.float64))
        return float(min(finite.sum(), 1e150))
