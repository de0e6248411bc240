"""Managers: order-based partial synopses of a signal that answer as one synopsis (Condor, section 6.2).

Synopses that depend on the order of values do not merge into the synopsis of their union. A manager stores the partials
and maps indices of the signal to indices of partials. So it can forward questions, and add the answers and their
bounds. Its size is the sum of the sizes of its partials.

- `SliceManager`: consecutive partials, such as the slices of a window.
- `GeneralManager`: partials of a signal that was partitioned round robin, a block of values at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest
from edgewater.synopses.base import Estimate, Properties
from edgewater.synopses.checks import check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import Layout, field
from edgewater.synopses.ordered import OrderedSynopsis
from edgewater.synopses.questions import Point, RangeSum
from edgewater.synopses.wavelets.haar import HaarWavelet
from edgewater.synopses.wavelets.haar_max import MaxErrorWavelet
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

MAX_PARTITIONS = 1 << 16  # limit: memory of a manager
MAX_BLOCK = 1 << 40  # limit: memory of a manager
_KEYS = 1 << 62  # format: of int64


class Manager(OrderedSynopsis):
    """Partials by key. A partial is an order-based synopsis: it answers `Point` and `RangeSum`, and has `records`.

    Managers merge as sets of partials, in any order and more than once. They keep references: after a caller has
    registered a partial, the caller must not use it.
    """

    kind: ClassVar[str]
    properties: ClassVar[Properties] = Properties(idempotent=True, ordered=True)
    required: ClassVar[tuple[str, ...]] = ()
    """Attributes that are parameters."""

    def __init__(self, partials: Iterable[tuple[int, Any]] = ()) -> None:
        self._partials: dict[int, Any] = {}
        for key, partial in partials:
            self.register(key, partial)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._partials)} partials, {self.records} values, {self.nbytes} bytes>"

    @property
    def partials(self) -> Mapping[int, Any]:
        """The partials by key, ascending."""
        return dict(sorted(self._partials.items()))

    @property
    def records(self) -> int:
        """The number of values in all partials."""
        return sum(int(partial.records) for partial in self._partials.values())

    @property
    def nbytes(self) -> int:
        return sum(int(partial.nbytes) for partial in self._partials.values())

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that must be equal for a merge."""
        return {name: getattr(self, name) for name in self.required}

    def _check_key(self, key: int) -> int:
        return check_whole("key", key, -_KEYS, _KEYS)

    def register(self, key: int, partial: Any) -> None:
        """Adds a partial.

        Raises:
            InvalidRequest: a key out of range, or a synopsis that does not answer `Point` and `RangeSum`.
            IncompatibleSynopses: the key has another partial.
        """
        key = self._check_key(key)
        if not {Point, RangeSum} <= set(getattr(partial, "questions", ())) or not hasattr(partial, "records"):
            accepted = "an order-based synopsis, which answers Point and RangeSum"
            raise InvalidRequest("partial", type(partial).__name__, accepted)
        held = self._partials.get(key)
        if held is not None and held is not partial and held.to_bytes() != partial.to_bytes():
            raise IncompatibleSynopses(f"{self.kind}: there are two different partials of key {key}")
        self._partials[key] = partial

    def merge_many(self, others: list[Self]) -> Self:
        """Returns a manager of copies of all partials.

        Raises:
            IncompatibleSynopses: other kinds or parameters, or two different partials of one key.
        """
        result = type(self)(**self.parameters)
        for other in (self, *others):
            codec.require_equal("synopses", self.kind, getattr(other, "kind", type(other).__name__))
            codec.require_equal(self.kind, self.parameters, other.parameters)
            for key, partial in other._partials.items():
                result.register(key, type(partial).from_bytes(partial.to_bytes()))
        return result

    def _routed(self, first: int, end: int) -> Iterable[tuple[int, int, int]]:
        """Yields (key, first, last) for each partial with indices in [first, end) of the signal.

        The yielded `first` and `last`, both included, are indices of the partial.
        """
        raise NotImplementedError

    def _range_sum(self, first: int, last: int) -> Estimate:
        answers = []
        for key, low, high in self._routed(first, last + 1):
            partial = self._partials[key]
            answers.append(partial.query(Point(low) if low == high else RangeSum(low, high)))
        # Union bound: the failures of the partials add up.
        confidence = max(1 - math.fsum(1 - a.confidence for a in answers), 0.0)
        value, lower, upper = (math.fsum(getattr(a, name) for a in answers) for name in ("value", "lower", "upper"))
        # Each sum is rounded once.
        return Estimate(
            value, float(np.nextafter(lower, -np.inf)), float(np.nextafter(upper, np.inf)), confidence, self.kind
        )

    def to_message(self) -> SynopsisMessage:
        message = codec.header(self.kind, self.version, self.parameters, records=self.records)
        partials = self.partials
        message.arrays.append(codec.encode(np.array(list(partials), np.int64)))
        message.parts.extend(partial.to_message() for partial in partials.values())
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        parameters = codec.open_message(message, cls.kind, cls.version, 1, len(message.parts))
        (keys,) = Layout.of(field("keys", "<i8", len(message.parts))).decode(cls.kind, message.arrays)
        if (keys[1:] <= keys[:-1]).any():
            raise CorruptSynopsis(f"{cls.kind}: keys are not ascending")
        try:
            result = cls(**{name: parameters[name] for name in cls.required})
            for key, partial in zip(keys.tolist(), message.parts, strict=True):
                result.register(key, cls._read_partial(partial))
        except (KeyError, TypeError, InvalidRequest, IncompatibleSynopses) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and partials do not fit: {exc}") from exc
        return result

    @classmethod
    def _read_partial(cls, message: SynopsisMessage) -> Any:
        kinds = cls._partial_kinds()
        if message.kind not in kinds:
            raise CorruptSynopsis(f"{cls.kind}: a partial of kind {message.kind!r}, expected {' or '.join(kinds)}")
        return kinds[message.kind].from_message(message)

    @classmethod
    def _partial_kinds(cls) -> dict[str, Any]:
        return {HaarWavelet.kind: HaarWavelet, MaxErrorWavelet.kind: MaxErrorWavelet}


class SliceManager(Manager):
    """Consecutive partials in the order of their keys, such as the slices of a window by their starts."""

    kind: ClassVar[str] = "slice_manager"

    def update(self, values: Any, *, times: Any = None) -> None:
        """Appends values to the last partial. Raises InvalidRecord, or InvalidRequest if there is no partial."""
        if not self._partials:
            raise InvalidRequest("values", "values", "a manager with a partial", "this manager has none")
        self._partials[max(self._partials)].update(values, times=times)

    def _routed(self, first: int, end: int) -> Iterable[tuple[int, int, int]]:
        start = 0
        for key, partial in self.partials.items():
            low, high = max(first, start) - start, min(end, start + partial.records) - start
            if low < high:
                yield key, low, high - 1
            start += int(partial.records)


class GeneralManager(Manager):
    """Partials of a signal that was partitioned round robin: index i is in partition (i // block) mod partitions.

    Its index in the partition is (i // block // partitions) · block + i mod block. For the usual block of one value,
    index i of the signal is index i div P of partition i mod P.

    Args:
        partitions: the number of partitions, P.
        block: number of consecutive values in one partition.
        partials: (partition, synopsis) of some or all partitions; more may be registered or merged later.
    """

    kind: ClassVar[str] = "general_manager"
    required: ClassVar[tuple[str, ...]] = ("partitions", "block")

    def __init__(self, partitions: int, block: int = 1, partials: Iterable[tuple[int, Any]] = ()) -> None:
        self.partitions = check_whole("partitions", partitions, 1, MAX_PARTITIONS)
        self.block = check_whole("block", block, 1, MAX_BLOCK)
        super().__init__(partials)

    @property
    def missing(self) -> list[int]:
        """The partitions without a partial."""
        return [p for p in range(self.partitions) if p not in self._partials]

    def _check_key(self, key: int) -> int:
        return check_whole("partition", key, 0, self.partitions - 1)

    def update(self, values: Any, *, times: Any = None) -> None:
        """Appends values to the signal, distributed over the partials of all partitions.

        Raises:
            InvalidRecord: the partials do not accept the values; nothing is added then.
            InvalidRequest: a partial is missing, or has another number of values than the signal's length implies.
        """
        self._require_partials(range(self.partitions))
        start = self._length()
        array = np.asarray(values)
        self._partials[0].merge_many([]).update(array)  # raises before anything changes
        owner = (np.arange(start, start + len(array)) // self.block) % self.partitions
        for key, partial in self.partials.items():
            partial.update(array[owner == key])

    def _before(self, key: int, index: int) -> int:
        """Returns the number of indices below `index` that belong to a partition."""
        rounds, rest = divmod(index, self.block * self.partitions)
        return rounds * self.block + min(max(rest - key * self.block, 0), self.block)

    def _require_partials(self, keys: Iterable[int]) -> None:
        missing = [key for key in keys if key not in self._partials]
        if missing:
            shown = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
            raise InvalidRequest("partition", shown, f"the partials of all {self.partitions} partitions", "missing")

    def _length(self) -> int:
        """Returns the length of the signal. Raises InvalidRequest if the partials' lengths contradict each other."""
        if not self._partials:
            return 0
        ends = [self._end(key, int(partial.records)) for key, partial in self._partials.items() if partial.records]
        length = max(ends, default=0)
        for key, partial in self._partials.items():
            if int(partial.records) != self._before(key, length):
                accepted = f"{self._before(key, length)} values in it, for a signal of {length}"
                raise InvalidRequest("partition", key, accepted, f"it has {partial.records}")
        return length

    def _end(self, key: int, count: int) -> int:
        """Returns the length of a signal whose last value is the last value of a partition with `count` values."""
        rounds, rest = divmod(count - 1, self.block)
        return (rounds * self.partitions + key) * self.block + rest + 1

    def _routed(self, first: int, end: int) -> Iterable[tuple[int, int, int]]:
        for key in range(self.partitions):
            low, high = self._before(key, first), self._before(key, end)
            if low < high:
                self._require_partials([key])
                yield key, low, high - 1

    @classmethod
    def _partial_kinds(cls) -> dict[str, Any]:
        return {**super()._partial_kinds(), SliceManager.kind: SliceManager}
