"""The subjects and the zoo of data sets that `test_battery.py` puts every registered stack through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.streams import COLUMN_TYPES
from edgewater.synopses import Count, Distinct, Maximum, Mean, Minimum, Quantile, Question, Rank, Sum, Variance, codec
from edgewater.synopses.base import Stack
from edgewater.synopses.registry import function_named, function_names, stack_from_message

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
}

FLOAT_STATE = {"float_sum", "mean", "variance", "ddsketch"}
"""Kinds whose state has float64 sums: equal to rounding only, while all others are equal to the bit."""


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
    return found


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
    stack.update(codes, values)
    return stack


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
        for question in QUESTIONS[kind]:
            given = stack.query(question)
            result[repr(question)] = np.stack([given.value, given.lower, given.upper])
    return result


def assert_same(left: Stack, right: Stack, scale: float = 0.0) -> None:
    """Equal to the bit, or, where the state has float sums, to their rounding.

    Args:
        scale: sum of the absolute values that went in.
    """
    assert len(left) == len(right)
    if left.kind not in FLOAT_STATE:
        assert to_bytes(left) == to_bytes(right)
        return
    mine, theirs = answers(left), answers(right)
    assert mine.keys() == theirs.keys()
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
