"""``ds_hll(x, lg_k=12)``: the number of distinct values, by DataSketches' HLL."""

from __future__ import annotations

from typing import Any, ClassVar

import datasketches
import numpy as np
import pyarrow as pa

from edgewater.base.errors import InvalidRequest
from edgewater.synopses import (
    ITEM_TYPES,
    Distinct,
    Estimates,
    Function,
    IntArray,
    Parameter,
    Parameters,
    Properties,
    Question,
    Questions,
    SingleSynopsis,
)

from .sketch_stack import SketchStack, by_group

DEFAULT_LG_K = 12
LG_K = Parameter.whole(DEFAULT_LG_K, 7, 21)
_COVERED = {1: 0.682, 2: 0.954, 3: 0.997}
"""Number of standard deviations, as the library takes it -> the confidence that it states for them."""

_HEAD_BYTES = {0: 8, 1: 12}
"""Mode in byte 7 of the library's format (0 list, 1 set; 2 is dense) -> offset of the 4-byte hashes."""


class HllStack(SketchStack):
    """An HLL sketch of 2^size registers per group.

    The library's estimate of a sketch that was never merged (HIP) depends on the order of values; that of a merged
    sketch does not. Every answer here comes from a merged sketch, so answers are commutative and idempotent.
    """

    kind: ClassVar[str] = "datasketches_hll"
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = (Distinct,)
    parameter: ClassVar[str] = "lg_k"

    def __init__(self, groups: int = 0, *, size: int = DEFAULT_LG_K) -> None:
        try:
            super().__init__(groups, size=LG_K.read(size))
        except ValueError as exc:
            raise InvalidRequest("lg_k", size, LG_K.accepted) from exc

    def update(self, codes: IntArray, values: Any, *, times: IntArray | None = None) -> None:
        """Adds a batch: Arrow strings, or a NumPy array. The bindings take one value per call, so only distinct values
        are added."""
        for group, at in by_group(codes):
            put = self._sketches[group].update
            if isinstance(values, pa.Array):
                items = values.take(pa.array(at)).unique().to_pylist()
            else:
                held = values[at].astype(np.int64) if values.dtype == np.bool_ else values[at]
                items = np.unique(held).tolist()
            for item in items:
                # The library ignores empty strings.
                put("\0" if item == "" else item)

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the number of distinct values per group, at the lowest of 68, 95 and 99.7 % that is at least the
        requested confidence."""
        self.check(question)
        confidence = question.confidence if isinstance(question, Distinct) else Distinct().confidence
        deviations = next((d for d, covered in _COVERED.items() if covered >= confidence), max(_COVERED))
        answers = np.array([self._answer(sketch, deviations) for sketch in self._sketches]).reshape(len(self), 3)
        value, lower, upper = answers.T
        return Estimates(value, np.minimum(lower, value), np.maximum(upper, value), _COVERED[deviations], self.kind)

    def _answer(self, sketch: Any, deviations: int) -> tuple[float, float, float]:
        union = datasketches.hll_union(self.size)
        union.update(sketch)
        union.update(sketch)
        return union.get_estimate(), union.get_lower_bound(deviations), union.get_upper_bound(deviations)

    def _new(self) -> Any:
        return datasketches.hll_sketch(self.size, datasketches.HLL_8)

    def _merged(self, mine: Any, other: Any) -> Any:
        if other.is_empty():
            return mine
        union = datasketches.hll_union(self.size)
        union.update(mine)
        union.update(other)
        return union.get_result(datasketches.HLL_8)

    @staticmethod
    def _dump(sketch: Any) -> bytes:
        data = bytes(sketch.serialize_compact())
        head = _HEAD_BYTES.get(data[7] & 3)
        # A small sketch lists its hashes in the order of its table; sorting them gives equal states equal bytes.
        return data if head is None else data[:head] + np.sort(np.frombuffer(data[head:], "<u4")).tobytes()

    @staticmethod
    def _load(data: bytes) -> Any:
        return datasketches.hll_sketch.deserialize(data)

    def _is_valid(self, sketch: Any) -> bool:
        return bool(sketch.lg_config_k == self.size)


class DataSketchesHll(SingleSynopsis[HllStack]):
    """The number of distinct values: one HLL sketch of the library."""

    stack_type = HllStack
    types: ClassVar[tuple[str, ...]] = ITEM_TYPES

    def __init__(self, lg_k: int = DEFAULT_LG_K) -> None:
        super().__init__(HllStack(1, size=lg_k))


def _make(parameters: Parameters, _: pa.DataType | None) -> HllStack:
    return HllStack(size=dict(parameters)["lg_k"])


DS_HLL = Function("ds_hll", _make, types=ITEM_TYPES, parameters={"lg_k": LG_K})
