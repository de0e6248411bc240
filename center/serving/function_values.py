"""Values of functions of a sample in an answer: numbers, and their interval.

They are computed on request from the answer's rows, so the job computes nothing. The result is deterministic: rows have
a fixed order and resampling is seeded.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from cachetools import LRUCache

from center.early import FunctionEstimate, estimate_function
from edgewater.answers.cells import (
    FunctionErrors,
    Texts,
    interval_columns,
    interval_texts,
    joined,
    json_text,
    nullable,
    number_texts,
    stated_confidence,
)
from edgewater.model.accuracy import AccuracyTarget
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates, FloatArray, RowSampleStack

DEFAULT_CONFIDENCE = 0.95
SEED = 20
CACHE_BYTES = 8 << 20
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
class FunctionPart:
    """The cell of a function: one interval or a list of named intervals, with the number of rows.

    Attributes:
        names: names of the function's numbers; a single empty name: it returns one number.
        values: one per group.
        requested: the confidence that the intervals were computed for.
        own_estimates: per number, the intervals before they are widened.
    """

    names: Sequence[str]
    values: Sequence[FunctionEstimate]
    requested: float
    own_estimates: Sequence[Estimates] = ()

    @property
    def confidence(self) -> float | None:
        stated = [stated_confidence(self._estimates(at)) for at in range(len(self.names))] if self.values else []
        return self.requested if any(stated) else None

    @classmethod
    def of(
        cls, measure: Measure, stack: RowSampleStack, confidence: float, widen: Callable[[Estimates], Estimates]
    ) -> FunctionPart:
        """Evaluates the function on each group's rows.

        Args:
            widen: widens intervals by what the answer lacks. Nothing bounds the effect of missing records on a
                function, so it returns the intervals unchanged, or makes them unknown.
        """
        assert measure.function.sample is not None
        function, parameters = measure.function.sample, dict(measure.parameters)
        values = [
            _estimated(measure, rows, float(rate), confidence)
            for rows, rate in zip(stack.rows_by_group(), stack.rates(), strict=True)
        ]
        part = cls(tuple(function.names(parameters, stack.columns)), values, confidence)
        own = [part._estimates(at) for at in range(len(part.names))]
        if np.isnan(widen(Estimates.exact(np.zeros(len(values)))).lower).any():
            values = [v.without_bounds() for v in values]
        return replace(part, values=values, own_estimates=own)

    def _estimates(self, at: int) -> Estimates:
        value, lower, upper = (
            np.array([getattr(v, bound)[at] for v in self.values], float) for bound in ("value", "lower", "upper")
        )
        return Estimates(value, lower, upper, self.requested, "sample")

    def first_interval(self) -> Estimates | None:
        return self._estimates(0) if self.names == ("",) else None

    @property
    def errors(self) -> FunctionErrors:
        """The errors of all groups."""
        each = self.values
        return FunctionErrors(
            np.array([v.error for v in each], float),
            np.array([v.size for v in each], np.int64),
            np.array([v.rate for v in each], float),
            tuple(v.problem for v in each),
        )

    def texts(self, rows: int) -> Texts:
        each = [interval_texts(self._estimates(at), False) for at in range(len(self.names))]
        cell = each[0] if self.names == ("",) else self._named(each)
        errors = self.errors
        sizes = number_texts(errors.sizes.astype(np.float64), True)
        stated = (number_texts(errors.errors, False), ',"size":', sizes, ',"rate":', number_texts(errors.rates, False))
        problems = [f',"problem":{json_text(p)}' if p else "" for p in errors.problems]
        return joined(cell, ',"error":', *stated, pa.array(problems, pa.string()))

    def _named(self, each: Sequence[Texts]) -> Texts:
        parts = [part for n, e in zip(self.names, each, strict=True) for part in (f'{{"name":{json_text(n)},', e, "},")]
        return joined('"values":[', *parts[:-1], "}]")

    def columns(self, measure: str, rows: int) -> dict[str, pa.Array]:
        result: dict[str, pa.Array] = {}
        for at, name in enumerate(self.names):
            result.update(interval_columns(f"{measure}.{name}" if name else measure, self._estimates(at)))
        for name in ("error", "size", "rate"):
            result[f"{measure}.{name}"] = nullable(np.array([getattr(v, name) for v in self.values], float))
        return result


def _estimated(measure: Measure, rows: FloatArray, rate: float, confidence: float) -> FunctionEstimate:
    """Returns one group's value, from a cache.

    It is expensive and depends on the rows only. So one entry serves other selections of groups, formats and revisions.
    """
    function = measure.function.sample
    assert function is not None
    of_rows = hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
    key = (measure.function.name, measure.parameters, rows.shape, of_rows, rate, confidence)
    with _LOCK:
        cached = _CACHE.get(key)
    if cached is not None:
        return cached
    # A generator per group: a group's interval does not depend on the other rendered groups.
    rng = np.random.default_rng(SEED)
    made = estimate_function(function, dict(measure.parameters), rows, rate, rng, confidence=confidence)
    with _LOCK:
        _CACHE[key] = made
    return made


_CACHE: LRUCache[Any, FunctionEstimate] = LRUCache(CACHE_BYTES, getsizeof=lambda e: 3 * e.value.nbytes + 512)
_LOCK = threading.Lock()
