"""Samples of many groups: rows of a group, an identity and a value, kept sorted.

Which rows stay is a function of the set of identities alone, so samples merge in any order, over any
tree, and twice, to the same bits. An identity is that of a record: the `source` that gave it, a number
that no other source may have, and the record's number within it. Two rows of one identity are one
record that came twice; if their values differ, two sources were given one number, and that is an error
and not a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRecord, InvalidRequest
from edgewater.synopses.base import BoolArray, Estimates, IntArray, Question
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.columns import Many
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray, finalised
from edgewater.synopses.items import ItemStack, read_item_type
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_CHUNK = 1 << 15
_MIN_PENDING = 1 << 14
_DTYPES = {"int64": np.int64, "float64": np.float64, "bool": np.bool_}

Key = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Records of a sample.

    Attributes:
        groups: int64 per row.
        keys: the columns of the identity, the most significant first.
        values: NumPy array, or Arrow array of strings.
    """

    groups: IntArray
    keys: tuple[Key, ...]
    values: Any

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def nbytes(self) -> int:
        return int(self.groups.nbytes + sum(k.nbytes for k in self.keys) + self.values.nbytes)

    def at(self, index: npt.NDArray[Any]) -> Rows:
        """These rows (positions, or a mask)."""
        if index.dtype == np.bool_:
            index = np.flatnonzero(index)
        values = self.values.take(pa.array(index)) if isinstance(self.values, pa.Array) else self.values[index]
        return Rows(self.groups[index], tuple(k[index] for k in self.keys), values)

    def sorted(self) -> Rows:
        """By group and key."""
        if (self.groups[1:] == self.groups[:-1]).all() and len(self.keys) == 1:
            return self.at(np.argsort(self.keys[0]))
        return self.at(np.lexsort((*self.keys[::-1], self.groups)))

    def repeats(self) -> BoolArray:
        """Which rows have the group and key of the row before; the first never."""
        same = self.groups[1:] == self.groups[:-1]
        for key in self.keys:
            same &= key[1:] == key[:-1]
        return np.concatenate([[False], same])[: len(self)]

    def ascend(self) -> bool:
        """Whether they are sorted by group and key, each distinct."""
        same = np.ones(max(len(self) - 1, 0), bool)
        for column in (self.groups, *self.keys):
            if (same & (column[1:] < column[:-1])).any():
                return False
            same &= column[1:] == column[:-1]
        return not same.any()

    def starts(self, groups: int) -> IntArray:
        """Where each of `groups` groups begins among sorted rows, and the end: shape (groups + 1,)."""
        return np.searchsorted(self.groups, np.arange(groups + 1))


def source_of(*names: str) -> int:
    """A `source` for what these names identify together, such as an edge and its incarnation: 64 bits of a hash.

    The same everywhere and for ever; two of a thousand identities are given one number with probability 3e-14.
    """
    text = "\0".join(names).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def concatenated(parts: list[Rows]) -> Rows:
    values = [p.values for p in parts]
    return Rows(
        np.concatenate([p.groups for p in parts]),
        tuple(np.concatenate(columns) for columns in zip(*(p.keys for p in parts), strict=True)),
        pa.concat_arrays(values) if isinstance(values[0], pa.Array) else np.concatenate(values),
    )


def tags_of(sources: WordArray, numbers: IntArray, seed: int) -> WordArray:
    """A uniform 64-bit hash per identity; distinct for distinct numbers of one source."""
    return finalised(finalised(sources, seed) + numbers.view(np.uint64), 1)


class SampleStack(ItemStack):
    """A sample per group. Subclasses say what a row's key is (`_keys`) and which rows stay (`_kept`).

    Attributes:
        source: identifies this stack among all whose rows it will ever be merged with.
        level: how often it has been folded. Stacks of different levels merge at the higher one.
    """

    arrays: ClassVar[dict[str, tuple[str, float]]] = {}
    key_types: ClassVar[tuple[str, ...]]

    def __init__(
        self, groups: int = 0, *, source: int = 0, seed: int = DEFAULT_SEED, item_type: str | None = None
    ) -> None:
        if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < 1 << 64:
            raise InvalidRequest("source", source, "a whole number from 0 to 2^64 - 1")
        super().__init__(groups, seed=seed, item_type=item_type)
        self.source = source
        self.level = 0
        self._next = 0
        self._held = self._no_rows()
        self._runs: list[Rows] = []

    def _no_rows(self) -> Rows:
        values: Any = pa.array([], pa.string()) if self.item_type == "string" else np.zeros(0, self._dtype)
        return Rows(np.zeros(0, np.int64), tuple(np.zeros(0, t) for t in self.key_types), values)

    @property
    def _dtype(self) -> type:
        return _DTYPES.get(self.item_type or "float64", np.float64)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._held.nbytes + sum(r.nbytes for r in self._runs)

    # What a kind of sample is

    def _keys(self, numbers: IntArray, times: IntArray | None) -> tuple[Key, ...]:
        """The key columns of records of this source."""
        raise NotImplementedError

    def _kept(self, rows: Rows) -> npt.NDArray[Any]:
        """Which of the sorted, distinct rows stay: positions ascending, or a mask."""
        raise NotImplementedError

    def _promising(self, rows: Rows) -> BoolArray | None:
        """Which rows could stay, as far as is cheap to say; None: all."""
        return None

    def _most_levels(self) -> int:
        """How much further it can be folded."""
        raise NotImplementedError

    # Updating

    def update(
        self, codes: IntArray, values: Any, *, times: IntArray | None = None, ids: IntArray | None = None
    ) -> None:
        """Adds a batch: Arrow strings, or a NumPy array of bool, integers or floats.

        Args:
            times: int64 event times in ms, for samples that go by time; None: the records' numbers.
            ids: int64, the records' numbers within `source`. None: they are numbered as they come, on from
                those before, which a replay repeats only if it replays all of them.
        """
        known = self.item_type is not None
        self._learn(values)
        if not known:
            self._held = self._no_rows()
        for name, column in (("times", times), ("ids", ids)):
            if column is not None and (column.shape != (len(values),) or column.dtype != np.int64):
                accepted = f"{len(values)} int64 numbers, one per value"
                raise InvalidRecord(name, f"{column.dtype}{column.shape}", accepted)
        if ids is None:
            ids = np.arange(self._next, self._next + len(values))
            self._next += len(values)
        values = self._canonical(values)
        for at in range(0, len(values), _CHUNK):
            part = slice(at, at + _CHUNK)
            keys = self._keys(ids[part], None if times is None else times[part])
            self._add(Rows(np.asarray(codes[part], np.int64), keys, values[part]))

    def _canonical(self, values: Any) -> Any:
        """A copy in the type that is held, with one zero and one NaN."""
        if isinstance(values, pa.Array):
            return values
        held = values.astype(self._dtype)
        if held.dtype == np.float64:
            held += 0.0  # -0.0 + 0.0 is 0.0
            held[held != held] = np.nan
        return held

    def _add(self, rows: Rows) -> None:
        promising = self._promising(rows)
        if promising is not None:
            rows = rows.at(promising)
        if len(rows):
            self._runs.append(rows)
        if sum(map(len, self._runs)) > max(_MIN_PENDING, len(self._held)):
            self._settle()

    def _settle(self) -> Rows:
        """The rows of the sample, sorted by group and key."""
        if self._runs:
            rows, self._runs = concatenated([self._held, *self._runs]), []
            rows = rows.sorted()
            repeats = rows.repeats()
            if repeats.any():
                self._require_same(rows, repeats)
                rows = rows.at(~repeats)
            self._hold(rows.at(self._kept(rows)))
        return self._held

    def _hold(self, rows: Rows) -> None:
        self._held = rows

    def _require_same(self, rows: Rows, repeats: BoolArray) -> None:
        """Raises IncompatibleSynopses if two records of one identity have different values."""
        again = np.flatnonzero(repeats)
        differ = self._differ(rows.at(again).values, rows.at(again - 1).values)
        if differ.any():
            raise IncompatibleSynopses(
                f"{self.kind}: {int(differ.sum())} records have the identity of another record with another value; "
                f"every part that is merged needs a `source` of its own (this one has {self.source})"
            )

    def _differ(self, one: Any, two: Any) -> BoolArray:
        """Which values are not the same, row by row. A NaN is one NaN."""
        if isinstance(one, pa.Array):
            return np.asarray(~pc.equal(one, two).to_numpy(zero_copy_only=False))
        return np.asarray((one != two) & ((one == one) | (two == two)))

    # Merging

    def merge(self, other: Self, codes: IntArray) -> None:
        rows = self._rows_of(other)
        if len(rows):
            self._runs.append(Rows(codes[rows.groups], rows.keys, rows.values))
        self._settle()

    def merge_ones(self, others: Sequence[Self]) -> None:
        """Merges stacks of one group into this one, which has one too: which rows stay is decided once."""
        for other in others:
            self._add(self._rows_of(other))
        self._settle()

    def _rows_of(self, other: Self) -> Rows:
        """The rows of a part that is to be merged; this stack then has its type, its level and its count."""
        known = self.item_type is not None
        self._require_mergeable(other)
        if not known:
            self._held = self._no_rows()
        rows = other._settle()
        if other.level > self.level:
            self._fold_to(other.level)
        self._next = max(self._next, other._next)
        return rows

    def unite(self, many: Many) -> None:
        """Merges messages of one group each (`merging.Uniting`)."""
        message = many.stacked(2 + len(self.arrays), own=(1,))
        metas = codec.decode(message.arrays[0])
        levels, nexts = metas[0::2], metas[1::2]
        if len(levels) != len(nexts) or (levels != self.level).any():
            raise IncompatibleSynopses(f"{self.kind}: levels differ")
        message.arrays[0].CopyFrom(codec.encode(metas[:2]))
        stack = self.from_message(message)
        self._next = max(self._next, int(nexts.max()))
        self._expect(stack)
        rows = stack._settle()
        self._add(Rows(np.zeros(len(rows), np.int64), rows.keys, rows.values))
        self._settle()

    def _expect(self, many: Self) -> None:
        """Takes notice of what will be merged into the only group, so as to tell what is promising."""

    def fold(self, levels: int = 1) -> Self:
        """A copy of about 2^levels times fewer rows: what would stand there had it been built so."""
        if not 0 <= levels <= self._most_levels():
            raise InvalidRequest("level", levels, f"0 to {self._most_levels()}", f"{self.kind} of {self.parameters}")
        result = self.take(np.arange(len(self)))
        if levels:
            result._fold_by(levels)
        return result

    def _fold_by(self, levels: int) -> None:
        self._fold_to(self.level + levels)

    def _fold_to(self, level: int) -> None:
        rows = self._settle()
        self.level = level
        self._hold(rows.at(self._kept(rows)))

    def take(self, groups: IntArray) -> Self:
        rows = self._settle()
        result = super().take(groups)
        result.level, result._next = self.level, self._next
        starts = rows.starts(len(self))
        counts = np.diff(starts)[groups]
        ends = np.cumsum(counts)
        index = np.arange(int(counts.sum())) + np.repeat(starts[groups] - ends + counts, counts)
        taken = rows.at(index)
        result._hold(Rows(np.repeat(np.arange(len(groups)), counts), taken.keys, taken.values))
        return result

    def reset(self, groups: IntArray) -> None:
        """Makes these groups empty. Numbers are not given out again: what was shipped keeps its identity."""
        rows = self._settle()
        super().reset(groups)
        gone = np.zeros(len(self), bool)
        gone[groups] = True
        self._hold(rows.at(~gone[rows.groups]))

    def query(self, question: Question | None = None) -> Estimates:
        """The answer per group."""
        raise NotImplementedError

    def sampled(self) -> tuple[IntArray, pa.Array]:
        """The sampled values of all groups: int64 group per value, ascending, and the values."""
        rows = self._settle()
        return rows.groups, pa.array(rows.values)

    def items(self, group: int = 0) -> pa.Array:
        """The sampled values of one group, in the order of their keys."""
        rows = self._settle()
        start, end = rows.starts(len(self))[group : group + 2]
        return pa.array(rows.values[start:end])

    # Bytes

    def to_message(self) -> SynopsisMessage:
        rows = self._settle()
        message = codec.header(self.kind, self.version, self._header_parameters, seed=self.seed)
        counts = np.diff(rows.starts(len(self)))
        meta = (np.array([self.level, self._next]), np.array([self.source], np.uint64))
        own = (self._view(name) for name in self.arrays)
        message.arrays.extend(codec.encode(array) for array in (*meta, *own, counts, *rows.keys))
        strings = isinstance(rows.values, pa.Array)
        message.arrays.append(codec.encode_keys(rows.values) if strings else codec.encode(rows.values))
        return message

    @classmethod
    def _of_parameters(cls, parameters: dict[str, Any], **common: Any) -> Self:
        raise NotImplementedError

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        own = len(cls.arrays)
        parameters = codec.open_message(message, cls.kind, cls.version, 4 + own + len(cls.key_types))
        item_type = read_item_type(parameters, cls.kind)
        meta, sources, *columns = (codec.decode(a) for a in message.arrays[:-1])
        held = message.arrays[-1]
        values = codec.decode_keys(held) if item_type == "string" else codec.decode(held)
        try:
            source = int(sources[0])
            result = cls._of_parameters(parameters, source=source, seed=message.seed, item_type=item_type)
            result._load_rows(meta, columns[:own], columns[own], tuple(columns[own + 1 :]), values)
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        return result

    def _load_rows(self, meta: IntArray, own: list[Key], counts: IntArray, keys: tuple[Key, ...], values: Any) -> None:
        """Takes over decoded arrays. Raises ValueError unless they are the state of this stack."""
        level, self._next = (int(x) for x in meta)
        for (name, (dtype, _)), array in zip(self.arrays.items(), own, strict=True):
            if array.shape != counts.shape or array.dtype != np.dtype(dtype):
                raise ValueError(f"array {name} is {array.dtype}{array.shape}")
            self._state[name] = array
        shapes = {k.shape for k in keys} | {(len(values),)}
        wanted = pa.string() if self.item_type == "string" else np.dtype(self._dtype)
        typed = [k.dtype for k in keys] == [np.dtype(t) for t in self.key_types] and counts.dtype == np.int64
        if isinstance(values, pa.Array) and values.null_count:
            raise ValueError("null values")
        if not typed or (values.type if isinstance(values, pa.Array) else values.dtype) != wanted:
            raise ValueError("columns of other types")
        if not 0 <= level <= self._most_levels() or counts.ndim != 1 or (counts < 0).any():
            raise ValueError(f"level {level}, counts {counts.tolist()[:5]}")
        if shapes != {(int(counts.sum()),)}:
            raise ValueError(f"columns of shapes {shapes} for {int(counts.sum())} rows")
        self.level, self._length = level, len(counts)
        rows = Rows(np.repeat(np.arange(len(counts)), counts), keys, values)
        self._check_rows(rows)
        self._hold(rows)

    def _check_rows(self, rows: Rows) -> None:
        """Raises ValueError unless decoded rows are such as `_settle` gives."""
        kept = self._kept(rows)
        count = int(kept.sum()) if kept.dtype == np.bool_ else len(kept)
        if not rows.ascend() or count != len(rows):
            raise ValueError("rows out of order, or more than there is room for")
