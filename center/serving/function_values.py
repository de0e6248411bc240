"""Values of functions of a sample in an answer: numbers, and their interval.

They are computed on request from the answer's rows, so the job computes nothing. The result is deterministic: rows have
a fixed order and resampling is seeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from center.early import FunctionEstimate, estimate_function
from center.serving.byte_cache import ByteCache
from edgewater.answers.cells import FunctionErrors, IntervalPart, ItemsPart, NumberPart, Part
from edgewater.answers.work import spend
from edgewater.arrivals.targets import AccuracyTarget
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates, FloatArray, RowSampleStack, Stack

DEFAULT_CONFIDENCE = 0.95
SEED = 20
CACHE_BYTES = 8 << 20  # limit: memory of the cache
"""Capacity of the cache of values."""


def function_confidence(spec: QuerySpec, measure: Measure, groups: int, requested: float | None = None) -> float:
    """Returns the confidence of each group's interval: the reader's, else the contract's, else 95 %."""
    if requested is not None:
        return requested
    accuracy = spec.accuracy
    if accuracy is None or accuracy.measure != measure.name:
        return DEFAULT_CONFIDENCE
    return AccuracyTarget(
        accuracy.error, accuracy.confidence, max(groups, 1), accuracy.scope or "each"
    ).group_confidence


@dataclass(frozen=True, slots=True)
class FunctionValues:
    """The values of a function, one per group, with the number of rows.

    Attributes:
        names: names of the function's numbers; a single empty name: it returns one number.
        estimates: per number, the intervals.
        own_estimates: per number, the intervals before they are widened.
    """

    names: Sequence[str]
    estimates: Sequence[Estimates]
    own_estimates: Sequence[Estimates]
    errors: FunctionErrors

    @classmethod
    def of(
        cls, measure: Measure, stack: Stack, confidence: float, widen: Callable[[Estimates], Estimates]
    ) -> FunctionValues:
        """Evaluates the function on each group's rows.

        Args:
            confidence: of the intervals.
            widen: widens intervals by what the answer lacks. Nothing bounds the effect of missing records on a
                function, so it returns the intervals unchanged, or makes them unknown.
        """
        assert measure.function.sample is not None and isinstance(stack, RowSampleStack)
        values = [
            _estimated(measure, rows, float(rate), confidence)
            for rows, rate in zip(stack.rows_by_group(), stack.rates(), strict=True)
        ]
        names = tuple(measure.function.sample.names(dict(measure.parameters), stack.columns))
        own = [_estimates(values, at, confidence) for at in range(len(names))]
        if np.isnan(widen(Estimates.exact(np.zeros(len(values)))).lower).any():
            values = [v.without_bounds() for v in values]
        errors = FunctionErrors(
            np.array([v.error for v in values], float),
            np.array([v.size for v in values], np.int64),
            np.array([v.rate for v in values], float),
            tuple(v.problem for v in values),
        )
        return cls(names, [_estimates(values, at, confidence) for at in range(len(names))], own, errors)

    def parts(self) -> list[Part]:
        """Returns the cell: one interval or a list of named intervals, with the number of rows."""
        named = list(zip(self.names, self.estimates, strict=True))
        is_one, errors = self.names == ("",), self.errors
        return [
            IntervalPart("", self.estimates[0]) if is_one else ItemsPart("values", ".", named, False, "name"),
            NumberPart("error", errors.errors),
            NumberPart("size", errors.sizes.astype(np.float64), True),
            NumberPart("rate", errors.rates),
            NumberPart("problem", pa.array([problem or None for problem in errors.problems], pa.string())),
        ]


def _estimates(values: Sequence[FunctionEstimate], at: int, confidence: float) -> Estimates:
    value, lower, upper = (np.array([getattr(v, n)[at] for v in values], float) for n in ("value", "lower", "upper"))
    return Estimates(value, lower, upper, confidence, "sample")


def _estimated(measure: Measure, rows: FloatArray, rate: float, confidence: float) -> FunctionEstimate:
    """Returns one group's value, from a cache.

    It is expensive and depends on the rows only. So one entry serves other selections of groups, formats and revisions.
    """
    function = measure.function.sample
    assert function is not None
    of_rows = hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
    key = (measure.function.name, measure.parameters, rows.shape, of_rows, rate, confidence)

    def made() -> FunctionEstimate:
        spend()
        # A generator per group: a group's interval does not depend on the other rendered groups.
        rng = np.random.default_rng(SEED)
        return estimate_function(function, dict(measure.parameters), rows, rate, rng, confidence=confidence)

    return _CACHE.get(key, made)


_CACHE = ByteCache(CACHE_BYTES, lambda estimate: 3 * int(estimate.value.nbytes))
