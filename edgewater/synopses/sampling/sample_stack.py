"""Stacks of samples: rows of a group, a record's identity and a value, sorted by group and key.

Which rows stay depends only on the set of identities. So samples merge in any order, over any tree and more than once,
with equal bits. Two rows of one identity with different values are an error: two sources have the same number.

- `SampleStack`: the base. `SizedSampleStack` has a fixed number of records, `TimedSampleStack` orders them by event
  time, `RateSampleStack` has a sampling rate per group.
- `RANGE`: the arrays of a stack that stores the least and the greatest value of all records, sampled or not.
- `SingleSample`: a sample as a user holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.base.errors import IncompatibleSynopses, InvalidRecord
from edgewater.synopses.array_stack import group_mask
from edgewater.synopses.base import (
    CHUNK,
    MIN_PENDING,
    BoolArray,
    Count,
    IntArray,
    Mean,
    Question,
    Sum,
    arrow_values,
    run_indices,
)
from edgewater.synopses.checks import check_whole, whole_numbers
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import STRINGS, Field, Layout, field, totals
from edgewater.synopses.hashing import DEFAULT_SEED
from edgewater.synopses.items import ItemStack
from edgewater.synopses.sampling.sample_rows import Key, SampleRows, concatenated, record_tags
from edgewater.synopses.shapes import Shape, ShownInterval, ShownNumber
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_SIZE = 1000
MAX_SIZE = 1 << 24  # limit: memory of a sample

_DTYPES = {"int64": np.int64, "float64": np.float64, "bool": np.bool_}


RANGE: dict[str, tuple[str, float]] = {"least": ("<f8", np.inf), "greatest": ("<f8", -np.inf)}
"""Without values, the least value of a group is +∞ and the greatest -∞. With a NaN, both are NaN."""
RANGE_FIELDS = (field("least", "<f8"), field("greatest", "<f8"))
_EXTREMA = (("least", np.minimum), ("greatest", np.maximum))
_ITEMS = Field("values", ("<i8", "<f8", "|b1", STRINGS), (("rows",),))


def sample_layout(keys: Sequence[str], values: Field = _ITEMS, own: tuple[Field, ...] = ()) -> tuple[Layout, ...]:
    """Returns the layout of a sample.

    Args:
        keys: the types of the columns of a record's identity.
        own: the kind's own arrays, with one value per group.
    """
    columns = (field(f"key {number}", of, "rows") for number, of in enumerate(keys))
    meta = field("level and next number", "<i8", 2, least=0, most=1 << 62), field("source", "<u8", 1)
    return (Layout.of(*meta, *own, totals("rows per group", "rows"), *columns, values),)


def sample_layouts(keys: Sequence[str], own: tuple[Field, ...] = ()) -> tuple[Layout, ...]:
    """Returns the layout of a sample with `RANGE`."""
    return sample_layout(keys, own=(*own, *RANGE_FIELDS))


class SampleStack(ItemStack):
    """A sample per group. Subclasses define the key of a row (`_keys`) and which rows stay (`_retained`).

    Attributes:
        source: the source of the records that `update` adds. Stacks that merge must have different sources.
        level: how many times release 0.3.0 has folded it. Only stacks of equal levels merge.
    """

    arrays: ClassVar[dict[str, tuple[str, float]]] = {}
    key_types: ClassVar[tuple[str, ...]] = ("<u8",)
    layouts: ClassVar[tuple[Layout, ...]] = sample_layout(key_types)
    carried: ClassVar[tuple[str, ...]] = ("source", "seed", "item_type")

    def __init__(
        self, groups: int = 0, *, source: int = 0, seed: int = DEFAULT_SEED, item_type: str | None = None
    ) -> None:
        super().__init__(groups, seed=seed, item_type=item_type)
        self.source = check_whole("source", source, 0, (1 << 64) - 1)
        self.level = 0
        self._next = 0
        self._rows = self._no_rows()
        self._runs: list[SampleRows] = []

    def _no_rows(self) -> SampleRows:
        values: Any = pa.array([], pa.string()) if self.item_type == "string" else np.zeros(0, self._dtype)
        return SampleRows(np.zeros(0, np.int64), tuple(np.zeros(0, t) for t in self.key_types), values)

    @property
    def _dtype(self) -> type:
        return _DTYPES.get(self.item_type or "float64", np.float64)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._rows.nbytes + sum(r.nbytes for r in self._runs)

    def _keys(self, numbers: IntArray, times: IntArray | None) -> tuple[Key, ...]:
        """Returns the key columns of records of this source: here their tags."""
        return (record_tags(self.source, numbers, self.seed),)

    @property
    def _max_level(self) -> int:
        """The greatest `level` of decoded bytes."""
        return 0

    def _retained(self, rows: SampleRows) -> npt.NDArray[Any]:
        """Returns which of the sorted, distinct rows stay: ascending positions, or a mask."""
        raise NotImplementedError

    def _candidates(self, rows: SampleRows) -> BoolArray | None:
        """Returns which rows may stay; a cheap test excludes the others. None: all rows may stay."""
        return None

    def update(
        self, codes: IntArray, values: Any, *, times: IntArray | None = None, ids: IntArray | None = None
    ) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats.

        Args:
            times: int64 event times in ms, for samples by time; None: the records' numbers.
            ids: int64, the records' numbers within `source`. None: consecutive numbers in the order of arrival, which
                a replay repeats only if it replays all records.
        """
        known = self.item_type is not None
        self._check_item_type(values)
        if not known:
            self._rows = self._no_rows()
        for name, column in (("times", times), ("ids", ids)):
            if column is not None and (column.shape != (len(values),) or column.dtype != np.int64):
                accepted = f"{len(values)} int64 numbers, one per value"
                raise InvalidRecord(name, f"{column.dtype}{column.shape}", accepted)
        if ids is None:
            ids = np.arange(self._next, self._next + len(values))
            self._next += len(values)
        values = self._canonical(values)
        self._extend_range(codes, values)
        for at in range(0, len(values), CHUNK):
            chunk = slice(at, at + CHUNK)
            keys = self._keys(ids[chunk], None if times is None else times[chunk])
            self._add(SampleRows(np.asarray(codes[chunk], np.int64), keys, values[chunk]))

    @property
    def keeps_range(self) -> bool:
        """Whether it stores the least and the greatest value of each group."""
        return "least" in self.arrays

    def _extend_range(self, codes: IntArray, values: Any) -> None:
        if not self.keeps_range or isinstance(values, pa.Array) or not len(values):
            return
        numbers = values if len(self) == 1 else values.astype(np.float64)
        with np.errstate(invalid="ignore"):  # NaN
            for name, extremum in _EXTREMA:
                held = self._view(name)
                if len(self) == 1:
                    held[0] = extremum(held[0], extremum.reduce(numbers))
                else:
                    extremum.at(held, codes, numbers)

    def _merge_range(self, other: Self, codes: IntArray) -> None:
        if self.keeps_range:
            with np.errstate(invalid="ignore"):
                for name, extremum in _EXTREMA:
                    extremum.at(self._view(name), codes, other._view(name).copy())  # `other` may be this stack

    def _complete(self) -> BoolArray:
        """Returns which groups contain all records of their population. Their range is then known, too."""
        raise NotImplementedError

    def _range_of_rows(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the least and the greatest sampled value per group."""
        rows = self._rows
        found = {name: np.full(len(self), empty) for name, (_, empty) in RANGE.items()}
        if not isinstance(rows.values, pa.Array):
            with np.errstate(invalid="ignore"):
                for name, extremum in _EXTREMA:
                    extremum.at(found[name], rows.groups, rows.values.astype(np.float64))
        return found

    def _canonical(self, values: Any) -> Any:
        """Returns a copy in the type of the sample, with one zero and one NaN."""
        if isinstance(values, pa.Array):
            return values
        held = values.astype(self._dtype)
        if held.dtype == np.float64:
            held += 0.0  # -0.0 + 0.0 is 0.0
            held[held != held] = np.nan
        return held

    def _add(self, rows: SampleRows) -> None:
        candidates = self._candidates(rows)
        if candidates is not None:
            rows = rows.at(candidates)
        if len(rows):
            self._runs.append(rows)
        if sum(map(len, self._runs)) > max(MIN_PENDING, len(self._rows)):
            self.consolidate()

    def consolidate(self) -> SampleRows:
        """Merges added rows into the sample, and returns its rows, sorted by group and key."""
        if self._runs:
            rows, self._runs = concatenated([self._rows, *self._runs]), []
            rows = rows.sorted()
            repeats = rows.repeats()
            if repeats.any():
                self._require_same(rows, repeats)
                rows = rows.at(~repeats)
            self._set_rows(rows.at(self._retained(rows)))
        return self._rows

    def _set_rows(self, rows: SampleRows) -> None:
        self._rows = rows

    def _require_same(self, rows: SampleRows, repeats: BoolArray) -> None:
        """Raises IncompatibleSynopses if two records of one identity have different values."""
        again = np.flatnonzero(repeats)
        differ = self._differ(rows.at(again).values, rows.at(again - 1).values)
        if differ.any():
            raise IncompatibleSynopses(
                f"{self.kind}: {int(differ.sum())} records have the identity of another record with another value; "
                f"every sample that is merged needs a `source` of its own (this one has {self.source})"
            )

    def _differ(self, one: Any, two: Any) -> BoolArray:
        """Returns which values differ, row by row; NaN equals NaN."""
        if isinstance(one, pa.Array):
            return np.asarray(~pc.equal(one, two).to_numpy(zero_copy_only=False))
        return np.asarray((one != two) & ((one == one) | (two == two)))

    def merge(self, other: Self, codes: IntArray) -> None:
        known = self.item_type is not None
        self._require_mergeable(other)
        if not known:
            self._rows = self._no_rows()
        rows = other.consolidate()
        self._next = max(self._next, other._next)
        self._merge_range(other, codes)
        if len(rows):
            self._runs.append(SampleRows(codes[rows.groups], rows.keys, rows.values))
        self.consolidate()

    def take(self, groups: IntArray) -> Self:
        rows = self.consolidate()
        result = super().take(groups)
        result.level, result._next = self.level, self._next
        starts = rows.starts(len(self))
        counts = np.diff(starts)[groups]
        taken = rows.at(run_indices(starts[groups], counts))
        result._set_rows(SampleRows(np.repeat(np.arange(len(groups)), counts), taken.keys, taken.values))
        return result

    def reset(self, groups: IntArray) -> None:
        """Empties these groups. Record numbers continue, so that shipped records keep their identities."""
        rows = self.consolidate()
        super().reset(groups)
        self._set_rows(rows.at(~group_mask(groups, len(self))[rows.groups]))

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        groups, _ = self.sampled()
        sizes = np.bincount(groups, minlength=len(self)).astype(np.float64)
        numeric = self.item_type != "string"  # strings have no mean
        kinds = [k for k in (Mean, Sum, Count) if k in self.questions and (numeric or k is Count)]
        # In a sampled group, a NaN is a value. The estimates have units of their own, and the mean's error counts.
        each = (ShownInterval(k.__name__.lower(), k(), False, sizes > 0, k is kinds[0]) for k in kinds)
        return (*each, ShownNumber("size", sizes, True))

    def sampled(self) -> tuple[IntArray, pa.Array]:
        """Returns the sampled values of all groups: int64 group per value, ascending, and the values."""
        rows = self.consolidate()
        return rows.groups, pa.array(rows.values)

    def items(self, group: int = 0) -> pa.Array:
        """Returns the sampled values of one group, in the order of their keys."""
        rows = self.consolidate()
        start, end = rows.starts(len(self))[group : group + 2]
        return pa.array(rows.values[start:end])

    def to_message(self) -> SynopsisMessage:
        rows = self.consolidate()
        message = self._header()
        counts = np.diff(rows.starts(len(self)))
        meta = (np.array([self.level, self._next]), np.array([self.source], np.uint64))
        own = [self._view(name) for name in self.arrays]
        if self.keeps_range:
            # A range that the rows show is not written.
            own[-2:] = [np.where(self._complete(), 0.0, extreme) for extreme in own[-2:]]
        message.arrays.extend(codec.encode(array) for array in (*meta, *own, counts, *rows.keys))
        strings = isinstance(rows.values, pa.Array)
        message.arrays.append(codec.encode_keys(rows.values) if strings else codec.encode(rows.values))
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        meta, source, *columns, values = arrays
        own = len(columns) - len(cls.key_types) - 1
        result = cls(**given, source=int(source[0]))
        result._load_rows(meta, columns[:own], columns[own], tuple(columns[own + 1 :]), values)
        return result

    def _load_rows(self, meta: IntArray, own: list[Key], counts: IntArray, keys: tuple[Key, ...], values: Any) -> None:
        """Sets decoded arrays. Raises ValueError unless they are a valid state."""
        level, self._next = (int(x) for x in meta)
        self._state = {name: np.full(len(counts), empty, dtype) for name, (dtype, empty) in self.arrays.items()}
        self._state.update(zip(self.arrays, own, strict=False))
        wanted = pa.string() if self.item_type == "string" else np.dtype(self._dtype)
        if (values.type if isinstance(values, pa.Array) else values.dtype) != wanted:
            raise ValueError("values of another type")
        if level > self._max_level:
            raise ValueError(f"level {level}")
        self.level, self._length = level, len(counts)
        rows = SampleRows(np.repeat(np.arange(len(counts)), counts), keys, values)
        self._check_rows(rows)
        self._set_rows(rows)
        if self.keeps_range:
            self._load_range()

    def _load_range(self) -> None:
        """Completes the range of decoded groups. Raises ValueError if a sampled value is outside of it."""
        complete = self._complete()
        for name, found in self._range_of_rows().items():
            self._state[name] = np.where(complete, found, self._view(name))
            held = self._state[name]
            beyond = found < held if name == "least" else found > held
            if (beyond | (np.isnan(found) & ~np.isnan(held))).any():
                raise ValueError(f"a sampled value beyond the {name} one")

    def _check_rows(self, rows: SampleRows) -> None:
        """Raises ValueError unless decoded rows are sorted and all of them stay."""
        ascend = rows.ascend()  # which rows stay is defined only for ascending rows
        retained = self._retained(rows) if ascend else np.zeros(0, bool)
        count = int(retained.sum()) if retained.dtype == np.bool_ else len(retained)
        if not ascend or count != len(rows):
            raise ValueError("rows out of order, or more rows than the sample has room for")


class SizedSampleStack(SampleStack):
    """A sample of at most `size` records per group."""

    required: ClassVar[tuple[str, ...]] = ("size",)

    def __init__(self, groups: int = 0, *, size: int = DEFAULT_SIZE, **common: Any) -> None:
        self.size = check_whole("size", size, 1, MAX_SIZE)
        super().__init__(groups, **common)

    @property
    def capacity(self) -> int:
        """The largest number of records per group: `size`, halved `level` times."""
        return self.size >> self.level

    @property
    def _max_level(self) -> int:
        return self.size.bit_length() - 1


class TimedSampleStack(SizedSampleStack):
    """A sample of `size` records per group. Which records it keeps depends on their event times."""

    key_types: ClassVar[tuple[str, ...]] = ("<i8", "<u8", "<i8")  # time, source, number
    layouts: ClassVar[tuple[Layout, ...]] = sample_layout(key_types)

    def _keys(self, numbers: IntArray, times: IntArray | None) -> tuple[Key, ...]:
        sources = np.full(len(numbers), self.source, np.uint64)
        return (numbers if times is None else times, sources, numbers)

    def _group_keys(self, group: int) -> tuple[Key, ...]:
        rows = self.consolidate()
        start, end = rows.starts(len(self))[group : group + 2]
        return tuple(key[start:end] for key in rows.keys)

    def source_counts(self, group: int = 0) -> dict[int, int]:
        """Returns the number of a group's records per source."""
        sources, counts = np.unique(self._group_keys(group)[1], return_counts=True)
        return dict(zip(sources.tolist(), counts.tolist(), strict=True))

    def times(self, group: int = 0) -> IntArray:
        """Returns the event times of `items`, ascending."""
        return np.asarray(self._group_keys(group)[0])


class RateSampleStack(SampleStack):
    """A sample with a sampling rate per group, which only decreases.

    The array `threshold` (a name in `arrays`) determines the rate of a group. A larger threshold means a lower rate.
    """

    threshold: ClassVar[str]

    def _thresholds(self) -> npt.NDArray[Any]:
        """Returns the effective threshold per group."""
        raise NotImplementedError

    def merge(self, other: Self, codes: IntArray) -> None:
        other.consolidate()
        thresholds = other._thresholds().copy()  # `other` may be this stack
        super().merge(other, codes)
        np.maximum.at(self._view(self.threshold), codes, thresholds)
        self._set_rows(self._rows.at(self._retained(self._rows)))

    def to_message(self) -> SynopsisMessage:
        self.consolidate()
        self._view(self.threshold)[:] = self._thresholds()
        return super().to_message()


S = TypeVar("S", bound=SampleStack)


class SingleSample(SingleSynopsis[S]):
    """A `Synopsis` over a `SampleStack` of length 1."""

    @property
    def source(self) -> int:
        return self.stack.source

    def items(self) -> pa.Array:
        """Returns the sampled values."""
        return self.stack.items()

    def update(self, values: Any, *, times: Any = None, ids: Any = None) -> None:
        """Adds a batch. Skips nulls, with their times and ids.

        Args:
            values: NumPy or Arrow array or a sequence, of one of `types` or a narrower type; all batches of one type.
            times: int64 event times in ms, for samples by time.
            ids: the records' numbers within `source`; None: numbered in the order of arrival.

        Raises:
            InvalidRecord: values of another type, or another number of times or ids than of values.
        """
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        present = np.asarray(array.is_valid())
        columnar = self._columnar(arrow_values(array))
        columns = {
            name: None if column is None else whole_numbers(name, column, present)
            for name, column in (("times", times), ("ids", ids))
        }
        if len(columnar):
            self.stack.update(np.zeros(len(columnar), np.int64), columnar, **columns)
            self.records += len(columnar)
