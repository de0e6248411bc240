"""Managers: order-based synopses of parts of a signal, asked as if they were one (Condor, section 6.2).

Synopses that keep the order of values do not merge into one of their union. A manager holds the parts and
knows which index of the whole is which index of which part, so that it can forward questions and add up the
answers, with their bounds. Its size is that of its parts.

- `SliceManager`: parts one behind the other, such as the slices of a window.
- `GeneralManager`: parts among which the values were dealt out in turn, a block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest
from edgewater.synopses.base import Count, Estimate, Mean, Properties, Question, Questions, Sum
from edgewater.synopses.encoding import codec
from edgewater.synopses.items import check_whole
from edgewater.synopses.questions import Point, RangeSum
from edgewater.synopses.wavelets.haar import HaarWavelet
from edgewater.synopses.wavelets.haar_max import MaxErrorWavelet
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

MAX_PARTITIONS = 1 << 16
MAX_BLOCK = 1 << 40
_KEYS = 1 << 62


class Manager:
    """Parts by key. A part is an order-based synopsis: it answers `Point` and `RangeSum`, and counts `records`.

    Managers merge as sets of parts, so in any order and more than once. Parts are held, not copied: who
    registers one gives it away.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    properties: ClassVar[Properties] = Properties(idempotent=True, ordered=True)
    questions: ClassVar[Questions] = (RangeSum, Point, Sum, Mean, Count)

    def __init__(self, parts: Iterable[tuple[int, Any]] = ()) -> None:
        self._parts: dict[int, Any] = {}
        for key, part in parts:
            self.register(key, part)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._parts)} parts, {self.records} values, {self.nbytes} bytes>"

    @property
    def parts(self) -> Mapping[int, Any]:
        """The parts by key, ascending."""
        return dict(sorted(self._parts.items()))

    @property
    def records(self) -> int:
        """Values in all parts."""
        return sum(int(part.records) for part in self._parts.values())

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in self._parts.values())

    @property
    def parameters(self) -> dict[str, Any]:
        """What must be equal for two to merge."""
        return {}

    def _check_key(self, key: int) -> int:
        return check_whole("key", key, -_KEYS, _KEYS)

    def register(self, key: int, part: Any) -> None:
        """Takes a part over.

        Raises:
            InvalidRequest: a key that this manager cannot have, or a part that answers no question about indexes.
            IncompatibleSynopses: another part has this key.
        """
        key = self._check_key(key)
        if not {Point, RangeSum} <= set(getattr(part, "questions", ())) or not hasattr(part, "records"):
            raise InvalidRequest(
                "part", type(part).__name__, "an order-based synopsis, which answers Point and RangeSum"
            )
        held = self._parts.get(key)
        if held is not None and held is not part and held.to_bytes() != part.to_bytes():
            raise IncompatibleSynopses(f"{self.kind}: there are two different parts of key {key}")
        self._parts[key] = part

    def merge_many(self, others: list[Self]) -> Self:
        """A manager of all parts, each a copy of its own.

        Raises:
            IncompatibleSynopses: other kinds or parameters, or two different parts of one key.
        """
        result = type(self)(**self.parameters)
        for other in (self, *others):
            codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
            codec.require_equal(self.kind, self.parameters, other.parameters)
            for key, part in other._parts.items():
                result.register(key, type(part).from_bytes(part.to_bytes()))
        return result

    # Asking

    def query(self, question: Question | None = None) -> Estimate:
        """The answer, bounds added up; without a question, the sum of the signal.

        Raises:
            InvalidRequest: a question that is not one of `questions`, an index that is not there, or one whose
                part is not there.
        """
        n = self.records
        match question:
            case Count():
                return Estimate(n, n, n)
            case Point(index):
                return self._range(check_whole("index", index, 0, self._length() - 1), index)
            case RangeSum(first, last):
                check_whole("last", last, 0, self._length() - 1)
                return self._range(check_whole("first", first, 0, last), last)
            case None | Sum() | Mean():
                if not n:
                    return Estimate(math.nan, math.nan, math.nan)
                total = self._range(0, self._length() - 1)
                size = n if isinstance(question, Mean) else 1
                lower, upper = total.lower / size, total.upper / size
                return Estimate(total.value / size, lower, upper, total.confidence, self.kind)
        able = ", ".join(q.__name__ for q in self.questions)
        raise InvalidRequest("question", question, f"one of {able}", f"{self.kind} cannot answer it")

    def _length(self) -> int:
        """The length of the whole signal."""
        raise NotImplementedError

    def _routed(self, first: int, end: int) -> Iterable[tuple[int, int, int]]:
        """(key, first, last) per part that has indexes in [first, end) of the whole, by indexes of the part."""
        raise NotImplementedError

    def _range(self, first: int, last: int) -> Estimate:
        answers = []
        for key, low, high in self._routed(first, last + 1):
            part = self._parts[key]
            answers.append(part.query(Point(low) if low == high else RangeSum(low, high)))
        # Each misses with at most its own probability.
        confidence = max(1 - math.fsum(1 - a.confidence for a in answers), 0.0)
        value, lower, upper = (math.fsum(getattr(a, name) for a in answers) for name in ("value", "lower", "upper"))
        # Of sums that are rounded once, so are these.
        return Estimate(
            value, float(np.nextafter(lower, -np.inf)), float(np.nextafter(upper, np.inf)), confidence, self.kind
        )

    # Bytes

    def to_message(self) -> SynopsisMessage:
        message = codec.header(self.kind, self.version, self.parameters, records=self.records)
        parts = self.parts
        message.arrays.append(codec.encode(np.array(list(parts), np.int64)))
        message.parts.extend(part.to_message() for part in parts.values())
        return message

    def to_bytes(self) -> bytes:
        return codec.seal(self.to_message())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        return cls.from_message(codec.unseal(data))

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        parameters = codec.open_message(message, cls.kind, cls.version, 1, len(message.parts))
        keys = codec.decode(message.arrays[0])
        if keys.dtype != np.int64 or keys.shape != (len(message.parts),) or (np.diff(keys) <= 0).any():
            raise CorruptSynopsis(f"{cls.kind}: {len(message.parts)} parts for {keys.dtype}{keys.shape} keys in order")
        try:
            result = cls(**parameters)
            for key, part in zip(keys.tolist(), message.parts, strict=True):
                result.register(key, cls._part(part))
        except (TypeError, InvalidRequest, IncompatibleSynopses) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and parts do not fit: {exc}") from exc
        return result

    @classmethod
    def _part(cls, message: SynopsisMessage) -> Any:
        kinds = cls._part_kinds()
        if message.kind not in kinds:
            raise CorruptSynopsis(f"{cls.kind}: a part of kind {message.kind!r}, expected {' or '.join(kinds)}")
        return kinds[message.kind].from_message(message)

    @classmethod
    def _part_kinds(cls) -> dict[str, Any]:
        return {HaarWavelet.kind: HaarWavelet, MaxErrorWavelet.kind: MaxErrorWavelet}


class SliceManager(Manager):
    """Parts one behind the other in the order of their keys, such as the slices of a window by their starts."""

    kind: ClassVar[str] = "slice_manager"

    def update(self, values: Any, *, times: Any = None, weights: Any = None) -> None:
        """Adds values behind the last part, which has to be there. Raises InvalidRecord or InvalidRequest."""
        if not self._parts:
            raise InvalidRequest("values", "values", "a part that they go behind", "this manager has no part yet")
        self._parts[max(self._parts)].update(values, times=times, weights=weights)

    def _length(self) -> int:
        return self.records

    def _routed(self, first: int, end: int) -> Iterable[tuple[int, int, int]]:
        start = 0
        for key, part in self.parts.items():
            low, high = max(first, start) - start, min(end, start + part.records) - start
            if low < high:
                yield key, low, high - 1
            start += int(part.records)


class GeneralManager(Manager):
    """Parts among which a signal was dealt out in turn: index i is in part (i // block) mod partitions.

    There it has the index (i // block // partitions) · block + i mod block; with the usual block of one value,
    that is partition i mod P, index i div P.

    Args:
        partitions: P.
        block: values that were dealt out at a time.
        parts: (partition, synopsis), as far as they are there; the others may be registered or merged later.
    """

    kind: ClassVar[str] = "general_manager"

    def __init__(self, partitions: int, block: int = 1, parts: Iterable[tuple[int, Any]] = ()) -> None:
        self.partitions = check_whole("partitions", partitions, 1, MAX_PARTITIONS)
        self.block = check_whole("block", block, 1, MAX_BLOCK)
        super().__init__(parts)

    @property
    def parameters(self) -> dict[str, Any]:
        return {"partitions": self.partitions, "block": self.block}

    @property
    def missing(self) -> list[int]:
        """Partitions of which there is no part."""
        return [p for p in range(self.partitions) if p not in self._parts]

    def _check_key(self, key: int) -> int:
        return check_whole("partition", key, 0, self.partitions - 1)

    def update(self, values: Any, *, times: Any = None, weights: Any = None) -> None:
        """Deals values out among the parts, which all have to be there, on from where the signal ends.

        Raises:
            InvalidRecord: what the parts do not take; nothing is added then.
            InvalidRequest: a part is missing, or there are not the values in a part that belong there.
        """
        self._require_parts(range(self.partitions))
        start = self._length()
        array = np.asarray(values)
        self._parts[0].merge_many([]).update(array, weights=weights)  # all or nothing
        owner = (np.arange(start, start + len(array)) // self.block) % self.partitions
        for key, part in self.parts.items():
            part.update(array[owner == key])

    def _before(self, key: int, index: int) -> int:
        """How many of the indexes below `index` belong to a part."""
        rounds, rest = divmod(index, self.block * self.partitions)
        return rounds * self.block + min(max(rest - key * self.block, 0), self.block)

    def _require_parts(self, keys: Iterable[int]) -> None:
        missing = [key for key in keys if key not in self._parts]
        if missing:
            shown = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
            raise InvalidRequest("partition", shown, f"the parts of all {self.partitions} partitions", "not there yet")

    def _length(self) -> int:
        """The length of the signal: as far as the parts that are there say so without a gap."""
        if not self._parts:
            return 0
        ends = [self._end(key, int(part.records)) for key, part in self._parts.items() if part.records]
        length = max(ends, default=0)
        for key, part in self._parts.items():
            if int(part.records) != self._before(key, length):
                raise InvalidRequest(
                    "partition",
                    key,
                    f"{self._before(key, length)} values in it, for a signal of {length}",
                    f"it has {part.records}",
                )
        return length

    def _end(self, key: int, count: int) -> int:
        """The length of a signal whose last value is the last of `count` in a part."""
        rounds, rest = divmod(count - 1, self.block)
        return (rounds * self.partitions + key) * self.block + rest + 1

    def _routed(self, first: int, end: int) -> Iterable[tuple[int, int, int]]:
        for key in range(self.partitions):
            low, high = self._before(key, first), self._before(key, end)
            if low < high:
                self._require_parts([key])
                yield key, low, high - 1

    @classmethod
    def _part_kinds(cls) -> dict[str, Any]:
        return {**super()._part_kinds(), SliceManager.kind: SliceManager}
