"""Data sets and questions of the tests: common cases and edge cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.synopses.base import Count, Distinct, Maximum, Mean, Minimum, Quantile, Question, Rank, Sum, Variance
from edgewater.synopses.questions import (
    Contains,
    FalsePositiveRate,
    Frequency,
    IntersectionSize,
    JoinSize,
    Proportion,
    Range,
    SelfJoinSize,
    SubsetCount,
    UnionSize,
)

SEED = 20240607  # format: a seed

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


@cache
def zoo(type_: str) -> dict[str, Any]:
    """Returns data sets of one column type in the form that stacks take: NumPy, or Arrow for strings."""
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
