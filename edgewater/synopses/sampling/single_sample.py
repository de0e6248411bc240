"""What a user holds of a sample: updates with event times and record numbers."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa

from edgewater.errors import InvalidRecord
from edgewater.synopses.base import BoolArray, IntArray, arrow_values
from edgewater.synopses.sampling.sample_rows import SampleStack
from edgewater.synopses.single import SingleSynopsis

S = TypeVar("S", bound=SampleStack)


class SingleSample(SingleSynopsis[S]):
    """A `Synopsis` over a `SampleStack` of length 1."""

    types: ClassVar[tuple[str, ...]] = ("int64", "float64", "string", "bool")

    @property
    def source(self) -> int:
        return self._stack.source

    def items(self) -> pa.Array:
        """The sampled values."""
        return self._stack.items()

    def update(self, values: Any, *, times: Any = None, weights: Any = None, ids: Any = None) -> None:
        """Adds a batch. Nulls are passed over, with their times and ids.

        Args:
            values: NumPy or Arrow array or a sequence, of one of `types` or a narrower type; all batches alike.
            times: int64 event times in ms, for samples that go by time.
            weights: not taken.
            ids: the records' numbers within `source`; None: numbered as they come.

        Raises:
            InvalidRecord: values of another type, weights, or as many times or ids as there are not values.
        """
        if weights is not None:
            raise InvalidRecord("weights", type(weights).__name__, "no weights", f"{self.kind} takes each value once")
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        present = np.asarray(array.is_valid())
        columnar = self._columnar(arrow_values(array))
        columns = {"times": _whole("times", times, present), "ids": _whole("ids", ids, present)}
        if len(columnar):
            self._stack.update(np.zeros(len(columnar), np.int64), columnar, **columns)
            self.records += len(columnar)


def _whole(name: str, given: Any, present: BoolArray) -> IntArray | None:
    if given is None:
        return None
    numbers = np.asarray(given)
    if numbers.dtype.kind not in "iu" or numbers.shape != present.shape:
        accepted = f"{len(present)} whole numbers, one per value"
        raise InvalidRecord(name, f"{numbers.dtype}{numbers.shape}", accepted)
    held: IntArray = numbers.astype(np.int64)[present]
    return held
