"""What earlier slices tell about a group: how many records it has had, and of what size.

A group is known by a 64-bit hash of its key, so a group costs 20 bytes and one number per measure, and
two groups that share a hash share a forecast and nothing else. Values are exponentially weighted means
over slices. The number of groups is bounded: beyond it those with the fewest records are forgotten,
which are the ones of which history has least to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edge.cache.entries import Remembered, SliceEntries
from edge.cache.error_target import Aim
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage

MAX_GROUPS = 1 << 16
LEARNING_RATE = 0.3
"""Weight of the newest slice."""
FORGOTTEN_BELOW = 0.02
"""Mean records per slice below which a group is forgotten: after about ten slices without one."""
CURVE_BINS = 64


@dataclass(frozen=True, slots=True)
class Recall:
    """Of some groups: mean records per slice, and per measure the mean total and sum of squares."""

    arrivals: FloatArray
    totals: Mapping[str, FloatArray]
    squares: Mapping[str, FloatArray]


@dataclass(slots=True)
class GroupHistory:
    """The history of one query's groups, learnt slice by slice.

    Attributes:
        slices: how many slices it has learnt from.
        scale: per measure, the largest total of any group in the first slice: the unit in which the
            errors of different measures are compared.
        aim: under a staleness budget, the error (in units of `scale`) that is aimed at.
        curve: under a staleness budget, how many of the groups with the largest initial prefix errors of
            the newest slice were still to appear when i/64 of it had passed.
        most_sends: the largest number of times that any group of the newest slice has left.
        groups: the number of groups of the newest slice.
    """

    measures: tuple[str, ...] = ()
    slices: int = 0
    scale: dict[str, float] = field(default_factory=dict)
    aim: Aim = field(default_factory=Aim)
    curve: FloatArray = field(default_factory=lambda: np.zeros(CURVE_BINS))
    most_sends: int = 1
    groups: int = 0
    _hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    _values: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def __post_init__(self) -> None:
        if not self._values.size:
            self._values = np.zeros((1 + 2 * len(self.measures), 0), np.float32)

    @property
    def nbytes(self) -> int:
        return int(self._hashes.nbytes + self._values.nbytes)

    def recall(self, entries: SliceEntries, groups: IntArray) -> Recall:
        """What is known of these groups; zeros for those that were never seen."""
        found = self._placed(entries).values[:, groups].astype(np.float64)
        names = list(enumerate(self.measures))
        return Recall(found[0], {m: found[1 + 2 * i] for i, m in names}, {m: found[2 + 2 * i] for i, m in names})

    def _placed(self, entries: SliceEntries) -> Remembered:
        """What is known of each group of a slice, looked up once and not at each pull."""
        known = entries.remembered
        if known.slices != self.slices:
            known.slices, known.values = self.slices, np.zeros((len(self._values), 0), np.float32)
        if known.values.shape[1] < len(entries):
            wanted = entries.hashes()[known.values.shape[1] :]
            fresh = np.zeros((len(self._values), len(wanted)), np.float32)
            at = np.searchsorted(self._hashes, wanted)
            inside = np.flatnonzero(at < len(self._hashes))
            hit = inside[self._hashes[at[inside]] == wanted[inside]]
            fresh[:, hit] = self._values[:, at[hit]]
            known.values = np.concatenate([known.values, fresh], axis=1)
        return known

    def learn(self, entries: SliceEntries) -> None:
        """Takes a slice in that has just closed."""
        fresh = np.array(
            [
                entries.arrivals,
                *(a for m in self.measures for a in (np.abs(entries.total(m)), entries.squares(m))),
            ],
            np.float32,
        ).reshape(len(self._values), len(entries))
        weight = LEARNING_RATE if self.slices else 1.0
        hashes, inverse = np.unique(np.concatenate([self._hashes, entries.hashes()]), return_inverse=True)
        values = np.zeros((len(self._values), len(hashes)), np.float32)
        known = len(self._hashes)
        values[:, inverse[:known]] = (1.0 - weight) * self._values
        values[:, inverse[known:]] += np.float32(weight) * fresh
        self._hashes, self._values = _bounded(hashes, values)
        if not self.scale:
            self.scale = {m: max(float(np.abs(entries.total(m)).max(initial=0.0)), 1e-300) for m in self.measures}
        self.slices += 1
        self.groups = len(entries)
        self.most_sends = max(1, int(entries.sends.max(initial=1)))

    def learn_curve(self, first_seen: npt.NDArray[np.float32]) -> None:
        """Takes in when the groups first appeared that had the largest initial prefix errors."""
        bins = np.minimum((first_seen * CURVE_BINS).astype(np.int64), CURVE_BINS - 1)
        counts = np.bincount(bins, minlength=CURVE_BINS)
        self.curve = (counts.sum() - np.cumsum(counts)).astype(np.float64)

    def still_to_come(self, elapsed: float) -> float:
        """`curve` at a time of the slice, 0 to 1."""
        return float(self.curve[min(int(elapsed * CURVE_BINS), CURVE_BINS - 1)])

    def snapshot(self) -> tuple[dict[str, Any], list[bytes]]:
        """A JSON document and blobs, read back by `restore`."""
        document = {
            "measures": list(self.measures), "slices": self.slices, "scale": self.scale, "aim": self.aim.snapshot(),
            "most_sends": self.most_sends, "groups": self.groups,
        }  # fmt: skip
        arrays: list[npt.NDArray[Any]] = [self._hashes, self._values, self.curve]
        return document, [codec.encode(a).SerializeToString(deterministic=True) for a in arrays]

    @classmethod
    def restore(cls, document: Mapping[str, Any], blobs: Sequence[bytes]) -> GroupHistory:
        hashes, values, curve = (codec.decode(ArrayMessage.FromString(blob)) for blob in blobs)
        return cls(
            tuple(document["measures"]), document["slices"], dict(document["scale"]), Aim.restore(document["aim"]),
            curve, document["most_sends"], document["groups"], hashes, values,
        )  # fmt: skip


def _bounded(
    hashes: npt.NDArray[np.uint64], values: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
    keep = values[0] >= FORGOTTEN_BELOW
    if np.count_nonzero(keep) > MAX_GROUPS:
        least = np.partition(values[0], len(hashes) - MAX_GROUPS)[len(hashes) - MAX_GROUPS]
        keep = values[0] > least  # ties go together: which of them came first must not matter
    return hashes[keep], values[:, keep]
