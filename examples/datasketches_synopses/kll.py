"""``ds_kll(x, k=200)``: quantiles within an error of rank, by DataSketches' KLL."""

from __future__ import annotations

from typing import Any, ClassVar

import datasketches
import numpy as np
import pyarrow as pa

from edgewater.base.errors import InvalidRequest
from edgewater.synopses import (
    Count,
    Estimates,
    Function,
    IntArray,
    Parameter,
    Parameters,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
    SingleSynopsis,
)

from .sketch_stack import SketchStack, by_group

DEFAULT_K = 200
K = Parameter.whole(DEFAULT_K, 8, 65535)
_CONFIDENCE = 0.99
"""The confidence of `normalized_rank_error`, as the library states it."""


class KllStack(SketchStack):
    """A KLL sketch of doubles per group.

    Not reproducible: the seed of the library's coins cannot be set, so equal values give different bytes once a group
    has more than k values. The coins of the built-in `kll` are hashes of the compacted values.
    """

    kind: ClassVar[str] = "datasketches_kll"
    properties: ClassVar[Properties] = Properties(commutative=False, reproducible=False)
    questions: ClassVar[Questions] = (Quantile, Rank, Count)
    parameter: ClassVar[str] = "k"

    def __init__(self, groups: int = 0, *, size: int = DEFAULT_K) -> None:
        try:
            super().__init__(groups, size=K.read(size))
        except ValueError as exc:
            raise InvalidRequest("k", size, K.accepted) from exc

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch of numbers; skips NaN, which has no rank."""
        held = values.astype(np.float64)
        for group, at in by_group(codes):
            self._sketches[group].update(held[at])

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the median. NaN where there are no values."""
        self.check(question)
        if isinstance(question, Count):
            return Estimates.exact(np.array([sketch.n for sketch in self._sketches], np.int64))
        rank_or_quantile = question if isinstance(question, Rank | Quantile) else Quantile(0.5)
        answers = np.array([_answer(sketch, rank_or_quantile) for sketch in self._sketches]).reshape(len(self), 3)
        value, lower, upper = answers.T
        return Estimates(value, np.fmin(lower, value), np.fmax(upper, value), _CONFIDENCE, self.kind)

    def _new(self) -> Any:
        return datasketches.kll_doubles_sketch(self.size)

    def _merged(self, mine: Any, other: Any) -> Any:
        mine.merge(other)
        return mine

    @staticmethod
    def _dump(sketch: Any) -> bytes:
        if not sketch.is_empty():
            sketch.get_rank(0.0)  # a query sorts the newest values; without it, equal states would differ in bytes
        return bytes(sketch.serialize())

    @staticmethod
    def _load(data: bytes) -> Any:
        return datasketches.kll_doubles_sketch.deserialize(data)

    def _is_valid(self, sketch: Any) -> bool:
        return bool(sketch.k == self.size)


def _answer(sketch: Any, question: Rank | Quantile) -> tuple[float, float, float]:
    if sketch.is_empty():
        return float("nan"), float("nan"), float("nan")
    error = sketch.normalized_rank_error(False) if sketch.is_estimation_mode() else 0.0
    if isinstance(question, Rank):
        rank = sketch.get_rank(question.x, True)
        return rank, max(rank - error, 0.0), min(rank + error, 1.0)
    if not 0 <= question.q <= 1:
        raise InvalidRequest("q", question.q, "a number from 0 to 1, such as 0.99")
    low, high = max(question.q - error, 0.0), min(question.q + error, 1.0)
    return sketch.get_quantile(question.q, True), sketch.get_quantile(low, True), sketch.get_quantile(high, True)


class DataSketchesKll(SingleSynopsis[KllStack]):
    """Quantiles within an error of rank: one KLL sketch of the library."""

    stack_type = KllStack
    types: ClassVar[tuple[str, ...]] = ("int64", "float64")

    def __init__(self, k: int = DEFAULT_K) -> None:
        super().__init__(KllStack(1, size=k))


def _make(parameters: Parameters, _: pa.DataType | None) -> KllStack:
    return KllStack(size=dict(parameters)["k"])


DS_KLL = Function("ds_kll", _make, parameters={"k": K})
