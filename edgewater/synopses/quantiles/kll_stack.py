"""KLL: quantiles with a bounded error of rank, whatever the values are.

Karnin, Lang and Liberty, "Optimal Quantile Approximation in Streams" (FOCS 2016). Values of level h
stand for 2^h each. A level that is too full is compacted: sorted, and of each pair one of the two goes
up a level, all the lower ones or all the upper ones by the toss of a coin. That shifts the rank of any
x by at most 2^h, and by 0 on average; so after compactions of levels h₁, h₂, … the error of any rank is
at most t with probability 1 - 2·exp(-t²/2V), V = Σ 4^hᵢ (Azuma and Hoeffding). V is counted, through
merges too, and the interval comes from it and not from a bound for the worst case.

A batch is sorted and compacted as one block, over all groups at once: rows stay sorted by group and
value, whatever their level, so a compaction is a selection and not a sort. Such large blocks are also
what makes V small: a block costs one step of 4^h however many values it holds.

Many sketches that are merged at once are thinned before they are sorted together (`kll_many`), a chunk of them at a
time; the chunks count from the first sketch, so that objects and their bytes give the same union.

Coins are hashes of what is compacted and of `source`, so a replay repeats them. Merging in another
order tosses other coins: states differ, and answers, but all keep the bound.

A replay repeats them only if what is compacted together is the same, so nothing but updates, merges and resets
moves a boundary. Questions and bytes look at a settled copy (`_settled`), and a stack's message holds what waits as
it is: version 2 has it behind the arrays of version 1, which a stack writes of which nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest
from edgewater.synopses.base import (
    BoolArray,
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Maximum,
    Minimum,
    Properties,
    Quantile,
    Question,
    Questions,
    Rank,
)
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.columns import Many
from edgewater.synopses.exact.aggregates import ArrayStack
from edgewater.synopses.hashing import DEFAULT_SEED, finalised, finalised_word
from edgewater.synopses.intervals import normal_quantile
from edgewater.synopses.items import check_whole
from edgewater.synopses.quantiles.kll_answers import Held, quantiles, ranks
from edgewater.synopses.quantiles.kll_blocks import (
    MAX_LEVEL,
    Block,
    Levels,
    compacted,
    concatenated,
    sorted_block,
    too_full,
)
from edgewater.synopses.quantiles.kll_many import cascaded, check_sketches, height_for, thinned
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_K = 200
MIN_K, MAX_K = 8, 1 << 16
_CHUNK = 1 << 15  # values that are sorted at a time: they fit the L2 cache
_OF_ALL: dict[str, Any] = {"n": np.sum, "nan": np.sum, "variance": np.sum, "min": np.min, "max": np.max}
_MERGED = 1 << 17  # values of other sketches that may wait


class KllStack(ArrayStack):
    """A KLL sketch per group.

    Args:
        k: room in the top level; two stacks merge only if they were made with the same.
        level: how often k has been halved since. Stacks of different levels merge.
        source: best another number for each part, so that their coins differ even if their data do not.
    """

    kind: ClassVar[str] = "kll"
    version: ClassVar[int] = 2
    properties: ClassVar[Properties] = Properties(commutative=False, foldable=True)
    questions: ClassVar[Questions] = (Quantile, Rank, Count, Minimum, Maximum)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {
        "n": ("<i8", 0),
        "nan": ("<i8", 0),
        "variance": ("<f8", 0.0),
        "min": ("<f8", np.inf),
        "max": ("<f8", -np.inf),
    }

    def __init__(
        self, groups: int = 0, *, k: int = DEFAULT_K, level: int = 0, source: int = 0, seed: int = DEFAULT_SEED
    ) -> None:
        self.k = check_whole("k", k, MIN_K, MAX_K)
        self.level = check_whole("level", level, 0, (k // MIN_K).bit_length() - 1)
        self.source = check_whole("source", source, 0, (1 << 64) - 1)
        self.seed = seed
        super().__init__(groups)
        self._rows: Block = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.uint8)
        self._runs: list[Block] = []  # in any order
        self._pending = 0
        self._shown: Self | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        return {"k": self.k}

    @property
    def nbytes(self) -> int:
        blocks = (self._rows, *self._runs)
        shown = self._shown.nbytes if self._shown is not None else 0
        return super().nbytes + sum(column.nbytes for block in blocks for column in block) + shown

    def _empty(self) -> Self:
        return type(self)(k=self.k, level=self.level, source=self.source, seed=self.seed)

    # Updating

    def update(self, codes: IntArray, values: npt.NDArray[Any], *, times: IntArray | None = None) -> None:
        """Adds a batch of integers or floats; integers count as the nearest float64."""
        for at in range(0, len(values), _CHUNK):
            self._add(codes[at : at + _CHUNK], values[at : at + _CHUNK])

    def _add(self, codes: IntArray, values: npt.NDArray[Any]) -> None:
        held: FloatArray = np.add(values, 0.0, dtype=np.float64)  # -0.0 + 0.0 is 0.0
        least = held.min(initial=np.inf)
        if least != least:
            real = held == held
            self._view("nan")[:] += np.bincount(codes[~real], minlength=len(self))
            codes, held = codes[real], held[real]
            least = held.min(initial=np.inf)
        if not len(held):
            return
        if len(self) == 1:
            state = self._state
            state["n"][0] += len(held)
            state["min"][0] = min(state["min"][0], least)
            state["max"][0] = max(state["max"][0], held.max())
        else:
            self._view("n")[:] += np.bincount(codes, minlength=len(self))
            np.minimum.at(self._view("min"), codes, held)
            np.maximum.at(self._view("max"), codes, held)
        groups = np.zeros(len(held), np.int64) if len(self) == 1 else codes.astype(np.int64)
        self._append((groups, held, np.zeros(len(held), np.uint8)))

    def _append(self, block: Block) -> None:
        self._runs.append(block)
        self._pending += len(block[0])
        self._shown = None
        if self._pending >= max(_CHUNK, len(self._rows[0])):
            self.condense()

    def condense(self) -> None:
        """Compacts all that waits. A step of the sequence of updates: what comes later depends on it."""
        self._shown = None
        if self._runs:
            # By themselves first: what is merged then is short.
            large = len(self) == 1 and self._pending > 2 * _CHUNK
            block = self._compacted(self._cascaded() if large else sorted_block(self._runs, len(self)))
            self._runs, self._pending = [], 0
            self._rows = self._compacted(sorted_block([self._rows, block], len(self)))

    def _settled(self) -> Self:
        """This stack if nothing waits, or a copy in which it was compacted; not to be changed."""
        if not self._runs:
            return self
        if self._shown is None:
            shown = self._empty()
            shown._length = len(self)
            shown._state = {name: self._view(name).copy() for name in self.arrays}
            shown._rows, shown._runs, shown._pending = self._rows, list(self._runs), self._pending
            shown.condense()
            self._shown = shown
        return self._shown

    def _compacted(self, rows: Block) -> Block:
        """Compacts levels, the lowest that is too full first, until every group has room."""
        if len(self) == 1:
            rows = rows if rows[2].any() else self._halved(rows[1])
            return compacted(rows, self.k >> self.level, self._coin)
        while True:
            chosen = too_full(rows, len(self), self.k >> self.level)
            if chosen is None:
                return rows
            rows = self._compact(rows, chosen)

    def _halved(self, values: FloatArray) -> Block:
        """The first compactions of a large block of one group, all of level 0: slices of it."""
        level, behind = 0, []
        while len(values) > 8 * self.k:
            pairs, coin = len(values) & ~1, self._coin(values, level)
            behind.append((values[pairs:], np.full(len(values) - pairs, level, np.uint8)))
            values, level = values[coin:pairs:2].copy(), level + 1  # side by side, for what comes next
        behind.append((values, np.full(len(values), level, np.uint8)))
        held, levels = (np.concatenate(columns) for columns in zip(*behind, strict=True))
        order = np.argsort(held, kind="stable")
        return np.zeros(len(held), np.int64), held[order], levels[order]

    def _cascaded(self) -> Block:
        """What is pending of one group, with the levels that are far too full thinned."""
        block, variance = cascaded(self._runs, 8 * (self.k >> self.level), self._word)
        self._state["variance"][0] += variance
        return block

    def _compact(self, rows: Block, chosen: IntArray) -> Block:
        """Compacts the chosen level of each group. Of an odd number of values the greatest stays behind."""
        groups, values, levels = rows
        picked = np.flatnonzero(levels == chosen[groups])
        theirs = groups[picked]
        starts = np.searchsorted(theirs, np.arange(len(self) + 1))
        rank = np.arange(len(picked)) - starts[theirs]
        paired = rank < (np.diff(starts) & ~1)[theirs]
        coins = self._coins(values[picked], starts, chosen)
        goes_up = paired & ((rank & 1) == coins[theirs])
        levels = levels.copy()
        levels[picked[goes_up]] += 1
        kept = np.ones(len(groups), bool)
        kept[picked[paired & ~goes_up]] = False
        weights = np.where(chosen >= 0, 4.0 ** np.maximum(chosen, 0), 0.0)
        self._view("variance")[:] += weights * (np.diff(starts) > 1)
        return groups[kept], values[kept], levels[kept]

    def _coins(self, values: FloatArray, starts: IntArray, chosen: IntArray) -> IntArray:
        """0 or 1 per group, from the values that are compacted and how many the group has seen."""
        words = np.ascontiguousarray(values).view(np.uint64)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(words)])
        words = np.diff(sums[starts]) + self._view("n").view(np.uint64) * np.uint64(64) + chosen.astype(np.uint64)
        return (finalised(finalised(words, self.seed), self.source) >> np.uint64(63)).astype(np.int64)

    def _coin(self, values: FloatArray, level: int) -> int:
        """The coin of the only group, by other means; counts the compaction."""
        self._state["variance"][0] += 4.0**level
        return self._word(values, level) >> 63

    def _word(self, values: FloatArray, level: int) -> int:
        """64 bits that depend on the values of the only group that are compacted, and on how many it has seen."""
        words = np.ascontiguousarray(values).view(np.uint64)
        word = (int(words.sum()) + int(self._state["n"][0]) * 64 + level) % (1 << 64)
        return finalised_word(finalised_word(word, self.seed), self.source)

    # Merging

    def merge(self, other: Self, codes: IntArray) -> None:
        mine, theirs = ({**s.parameters, "seed": s.seed} for s in (self, other))
        codec.require_equal(self.kind, mine, theirs)
        other = other._settled()
        groups, values, levels = other._rows
        for name in ("n", "nan", "variance"):
            self._view(name)[codes] += other._view(name)
        for name, better in (("min", np.minimum), ("max", np.maximum)):
            self._view(name)[codes] = better(self._view(name)[codes], other._view(name))
        self.level = max(self.level, other.level)
        self._append((codes[groups], values, levels))

    @property
    def unite_parts(self) -> int:
        """How many sketches are merged at a time: about a chunk of values."""
        return max(_CHUNK // self.k, 1)

    def merge_ones(self, others: Sequence[Self]) -> None:
        """Merges stacks of one group into this one, which has one too: many at a time."""
        settled = [other._settled() for other in others]
        mine = self.k, self.seed
        for other in settled:
            if (other.k, other.seed) != mine:
                self.merge(other, np.zeros(1, np.int64))  # which says what is wrong
            self.level = max(self.level, other.level)
        for at in range(0, len(settled), self.unite_parts):
            some = settled[at : at + self.unite_parts]
            totals = {name: np.array([other._state[name][0] for other in some]) for name in _OF_ALL}
            values, levels = (np.concatenate([other._rows[i] for other in some]) for i in (1, 2))
            self._merge_sorted(values, levels, totals)
        if self._pending > _CHUNK:
            self.condense()

    def unite(self, many: Many) -> None:
        """Merges messages of one group each, in which nothing waits (`merging.Uniting`)."""
        own = len(self.arrays)
        states = {name: many.each(number) for number, name in enumerate(self.arrays)}
        folded, counts = many.each(own), many.each(own + 2)
        if (folded != self.level).any():
            raise IncompatibleSynopses(f"{self.kind}: levels differ")
        for at in range(0, len(counts), self.unite_parts):
            some = slice(at, at + self.unite_parts)
            totals, ends = {name: state[some] for name, state in states.items()}, np.cumsum(counts[some])
            values, levels = (many.array(own + i, some) for i in (3, 4))
            check_sketches(totals, ends, values, levels)
            self._merge_sorted(values, levels, totals)

    def _merge_sorted(self, values: FloatArray, levels: Levels, totals: dict[str, npt.NDArray[Any]]) -> None:
        """Merges what sketches of one group hold, one after the other and each sorted, into the only group.

        Args:
            totals: of each array, its value per sketch.
        """
        self._shown = None
        state = self._state
        for name, of_all in _OF_ALL.items():
            state[name][0] = of_all([state[name][0], of_all(totals[name])])
        runs: list[Block] = [(np.zeros(len(values), np.int64), values, levels)] if len(values) else []
        if self._pending + len(values) > _CHUNK:
            sketches, k = len(totals["n"]), self.k >> self.level
            height = height_for(int(state["n"][0]), int(totals["n"].sum()) / sketches, k)
            runs, variance = thinned(values, levels, height, sketches, self._word)
            state["variance"][0] += variance
        self._runs += runs
        self._pending += sum(len(run[0]) for run in runs)
        if self._pending > _MERGED:
            self.condense()

    def fold(self, levels: int = 1) -> Self:
        """A copy with k halved `levels` times: about half the bytes and twice the error each."""
        most = ((self.k >> self.level) // MIN_K).bit_length() - 1
        if not 0 <= levels <= most:
            raise InvalidRequest("level", levels, f"0 to {most}", f"{self.kind} with k = {self.k >> self.level}")
        result = self.take(np.arange(len(self)))
        result.level += levels
        result._rows = result._compacted(result._rows)
        return result

    def take(self, groups: IntArray) -> Self:
        """A copy of these groups, in this order, in which nothing waits."""
        if self._runs:
            return self._settled().take(groups)
        held, values, levels = self._rows
        result = super().take(groups)
        starts = np.searchsorted(held, np.arange(len(self) + 1))
        counts = np.diff(starts)[groups]
        ends = np.cumsum(counts)
        at = np.arange(int(counts.sum())) + np.repeat(starts[groups] - ends + counts, counts)
        result._rows = np.repeat(np.arange(len(groups)), counts), values[at], levels[at]
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        gone = np.zeros(len(self), bool)
        gone[groups] = True
        self._rows, *runs = (_at(block, ~gone[block[0]]) for block in (self._rows, *self._runs))
        self._runs = [block for block in runs if len(block[0])]
        self._pending = sum(len(block[0]) for block in self._runs)
        self._shown = None

    # Asking

    def query(self, question: Question | None = None) -> Estimates:
        """The answer per group; without a question, the median. NaN where there are no values."""
        self.check(question)
        if self._runs:
            return self._settled().query(question)
        n = self._view("n")
        match question:
            case Count():
                return Estimates.exact(n)
            case Minimum() | Maximum():
                name = "min" if isinstance(question, Minimum) else "max"
                return Estimates.exact(np.where(n > 0, self._view(name), np.nan))
            case Rank(x, confidence):
                return ranks(self._held(confidence), x, self.kind)
            case Quantile(q, confidence):
                return quantiles(self._held(confidence), q, self.kind)
        return quantiles(self._held(Quantile(0.5).confidence), 0.5, self.kind)

    def _held(self, confidence: float) -> Held:
        least, greatest = self._view("min"), self._view("max")
        return Held(self._rows, self._view("n"), least, greatest, self._errors(confidence), confidence)

    def rank_errors(self, confidence: float = 0.95) -> FloatArray:
        """How far a rank may be off, per group, as a part of the group's values."""
        return np.asarray(self._settled()._errors(confidence) / np.maximum(self._view("n"), 1))

    def _errors(self, confidence: float) -> FloatArray:
        normal_quantile(confidence)  # checks it
        return np.asarray(np.sqrt(2 * self._view("variance") * math.log(2 / (1 - confidence))))

    # Bytes

    def to_message(self) -> SynopsisMessage:
        groups, values, levels = self._rows
        message = super().to_message()
        message.seed = self.seed
        counts = np.bincount(groups, minlength=len(self))
        meta = np.array([self.level]), np.array([self.source], np.uint64)
        waiting: Block | tuple[()] = concatenated(self._runs) if self._runs else ()
        message.version = 2 if waiting else 1
        message.arrays.extend(codec.encode(array) for array in (*meta, counts, values, levels, *waiting))
        return message

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        own, extra = len(cls.arrays), 3 if message.version == 2 else 0
        parameters = codec.open_message(message, cls.kind, cls.version, own + 5 + extra)
        state = SynopsisMessage(arrays=message.arrays[:own])
        level, source, counts, values, levels, *waiting = (codec.decode(a) for a in message.arrays[own:])
        try:
            result = cls(k=parameters["k"], level=int(level[0]), source=int(source[0]), seed=message.seed)
            result._load(state)
            if counts.shape != (len(result),) or counts.dtype != np.int64 or (counts < 0).any():
                raise ValueError(f"counts {counts.dtype}{counts.shape}")
            result._rows = np.repeat(np.arange(len(result)), counts), values, levels
            if waiting:
                result._runs, result._pending = [(waiting[0], waiting[1], waiting[2])], len(waiting[0])
            result._check_state()
        except (KeyError, IndexError, TypeError, ValueError, InvalidRequest) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters and arrays do not fit: {exc}") from exc
        return result

    def _check_state(self) -> None:
        """Raises ValueError unless decoded rows are the state of this stack."""
        weights = np.zeros(len(self))
        for groups, values, levels in (self._rows, *self._runs):
            if groups.ndim != 1 or groups.dtype != np.int64 or (groups < 0).any() or (groups >= len(self)).any():
                raise ValueError(f"groups {groups.dtype}{groups.shape}")
            if values.shape != groups.shape or values.dtype != np.float64:
                raise ValueError(f"values {values.dtype}{values.shape}")
            if levels.shape != values.shape or levels.dtype != np.uint8 or (levels > MAX_LEVEL).any():
                raise ValueError(f"levels {levels.dtype}{levels.shape}")
            if not ((values >= self._view("min")[groups]) & (values <= self._view("max")[groups])).all():
                raise ValueError("values beyond the extremes")
            weights += np.bincount(groups, 2.0**levels, len(self))
        groups, values, _ = self._rows
        ascending = (groups[1:] > groups[:-1]) | (values[1:] >= values[:-1])
        counted = (self._view("nan") >= 0).all() and (self._view("variance") >= 0).all()
        if not ascending.all() or (weights != self._view("n")).any() or not counted:
            raise ValueError("values out of order, or weights that do not add up to n")


def _at(block: Block, kept: BoolArray) -> Block:
    groups, values, levels = block
    return groups[kept], values[kept], levels[kept]
