"""KLL: quantiles with a bounded error of rank, for any distribution of values.

Karnin, Lang and Liberty, "Optimal Quantile Approximation in Streams" (FOCS 2016). A value of level h represents 2^h
values. A level that is too full is compacted: it is sorted, and of each pair one value goes up a level. A coin decides
whether the lower or the upper values of all pairs go up. A second coin decides whether the pairs begin at the first or
at the second value. A compaction shifts the rank of x by ±2^h if x separates the values of a pair, and by 0 otherwise.
With the second coin, x separates a pair with probability one half, whatever the data (or zero, if x is not between the
compacted values). So a shift is 0, 0, 2^h or -2^h: half the sum of two tosses of ±2^h, with the variance 4^h/2. If
pairs always began at the first value, each compaction of some data would shift the rank, with the variance 4^h.

V is the sum of these variances; it is counted, through merges too. The error of a rank is at most `dominated_quantile`
times √V with the stated probability. The interval follows from V and not from a worst-case bound.

A batch is sorted and compacted as one block, over all groups at once. Rows stay sorted by group and value, whatever
their level, so a compaction is a selection and not a sort. Such large blocks also keep V small: a block adds one step
of 4^h however many values it has.

Coins are hashes of the compacted values and of `source`, so a replay repeats them. A merge in another order tosses
other coins: states and answers differ, but all keep the bound. A replay also needs the same compactions, so only
updates, merges and resets start one. Questions read a compacted copy (`_compacted_copy`), and a stack's message has its
buffered values in three more arrays if there are any.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.array_stack import ArrayStack, group_mask, register_stack
from edgewater.synopses.base import (
    CHUNK,
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
    run_indices,
)
from edgewater.synopses.checks import check_confidence, check_fraction, check_not_nan, check_quantile, check_whole
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import Layout, count, field, totals
from edgewater.synopses.hashing import DEFAULT_SEED, finalised, finalised_word
from edgewater.synopses.intervals import dominated_quantile
from edgewater.synopses.quantiles.kll_compaction import (
    MAX_LEVEL,
    Block,
    compacted,
    concatenated,
    halved,
    shift_variance,
    sorted_block,
    too_full,
)
from edgewater.synopses.registry import Parameter
from edgewater.synopses.shapes import Shape, default_shapes, nans
from edgewater.synopses.single import SingleSynopsis
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

DEFAULT_K = 200
MIN_K, MAX_K = 8, 1 << 16  # limit: memory of a synopsis
WORST_ERROR_TIMES_K = 2.5  # measured: bench.synopses


_FIELDS = (
    count("n"),
    count("nan"),
    field("variance", "<f8", least=0, most=4.0 ** (2 * MAX_LEVEL)),
    field("min", "<f8"),
    field("max", "<f8"),
    field("level", "<i8", 1),
    field("source", "<u8", 1),
    totals("values per group", "values"),
    field("values", "<f8", "values"),
    field("levels", "|u1", "values", most=MAX_LEVEL),
)
_PENDING_FIELDS = (
    field("groups of buffered values", "<i8", "buffered values", least=0),
    field("buffered values", "<f8", "buffered values"),
    field("levels of buffered values", "|u1", "buffered values", most=MAX_LEVEL),
)


class KllStack(ArrayStack):
    """A KLL sketch per group.

    Args:
        k: room in the top level; only stacks of equal k merge.
        level: how many times release 0.3.0 has halved k. Only stacks of equal levels merge.
        source: a number that differs between partials, so that their coins differ even if their data do not.
    """

    kind: ClassVar[str] = "kll"
    properties: ClassVar[Properties] = Properties(commutative=False)
    questions: ClassVar[Questions] = (Quantile, Rank, Count, Minimum, Maximum)
    required: ClassVar[tuple[str, ...]] = ("k",)
    carried: ClassVar[tuple[str, ...]] = ("level", "source", "seed")
    arrays: ClassVar[dict[str, tuple[str, float]]] = {
        "n": ("<i8", 0),
        "nan": ("<i8", 0),
        "variance": ("<f8", 0.0),
        "min": ("<f8", np.inf),
        "max": ("<f8", -np.inf),
    }
    layouts: ClassVar[tuple[Layout, ...]] = (Layout.of(*_FIELDS), Layout.of(*_FIELDS, *_PENDING_FIELDS))

    def __init__(
        self, groups: int = 0, *, k: int = DEFAULT_K, level: int = 0, source: int = 0, seed: int = DEFAULT_SEED
    ) -> None:
        self.k = check_whole("k", k, MIN_K, MAX_K)
        self.level = check_whole("level", level, 0, (k // MIN_K).bit_length() - 1)
        self.source = check_whole("source", source, 0, (1 << 64) - 1)
        self.seed = seed
        super().__init__(groups)
        self._rows: Block = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.uint8)
        self._runs: list[Block] = []  # buffered values, unsorted
        self._pending = 0
        self._compacted_self: Self | None = None

    @property
    def nbytes(self) -> int:
        blocks = (self._rows, *self._runs)
        copy = self._compacted_self.nbytes if self._compacted_self is not None else 0
        return super().nbytes + sum(column.nbytes for block in blocks for column in block) + copy

    def update(self, codes: IntArray, values: npt.NDArray[Any], *, times: IntArray | None = None) -> None:
        """Adds a batch of integers or floats; integers count as the nearest float64."""
        for at in range(0, len(values), CHUNK):
            self._add(codes[at : at + CHUNK], values[at : at + CHUNK])

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
        self._compacted_self = None
        if self._pending >= max(CHUNK, len(self._rows[0])):
            self.compact()

    def compact(self) -> None:
        """Compacts all buffered values before the state is shipped. Later states depend on when this happens."""
        self._compacted_self = None
        if self._runs:
            # The buffered values are compacted first: the merge with the other rows is then short.
            block = self._compacted(sorted_block(self._runs, len(self)))
            self._runs, self._pending = [], 0
            self._rows = self._compacted(sorted_block([self._rows, block], len(self)))

    def _compacted_copy(self) -> Self:
        """Returns this stack if no values are buffered, otherwise a compacted copy; read-only."""
        if not self._runs:
            return self
        if self._compacted_self is None:
            copy = self._empty()
            copy._length = len(self)
            copy._state = {name: self._view(name).copy() for name in self.arrays}
            copy._rows, copy._runs, copy._pending = self._rows, list(self._runs), self._pending
            copy.compact()
            self._compacted_self = copy
        return self._compacted_self

    def _compacted(self, rows: Block) -> Block:
        """Compacts levels until every group has room.

        Of the levels that are too full, the lowest is compacted first.
        """
        if len(self) == 1:
            rows = rows if rows[2].any() else self._halved(rows[1])
            return compacted(rows, self.k >> self.level, self._coins_of)
        while True:
            chosen = too_full(rows, len(self), self.k >> self.level)
            if chosen is None:
                return rows
            rows = self._compact_levels(rows, chosen)

    def _halved(self, values: FloatArray) -> Block:
        """Returns a large block of a single group, all of level 0, after its first compactions, which use slices."""
        level, remainders = 0, []
        while len(values) > 8 * self.k:
            values, rest = halved(values, self._coins_of(values, level))
            remainders.append((rest, np.full(len(rest), level, np.uint8)))
            level += 1
        remainders.append((values, np.full(len(values), level, np.uint8)))
        held, levels = (np.concatenate(columns) for columns in zip(*remainders, strict=True))
        order = np.argsort(held, kind="stable")
        return np.zeros(len(held), np.int64), held[order], levels[order]

    def _compact_levels(self, rows: Block, chosen: IntArray) -> Block:
        """Compacts the chosen level of each group. A value without a pair stays in its level."""
        groups, values, levels = rows
        picked = np.flatnonzero(levels == chosen[groups])
        theirs = groups[picked]
        starts = np.searchsorted(theirs, np.arange(len(self) + 1))
        coins, firsts = self._coins(values[picked], starts, chosen)
        rank = np.arange(len(picked)) - (starts[:-1] + firsts)[theirs]
        paired = (rank >= 0) & (rank < (np.diff(starts) - firsts & ~1)[theirs])
        goes_up = paired & ((rank & 1) == coins[theirs])
        levels = levels.copy()
        levels[picked[goes_up]] += 1
        kept = np.ones(len(groups), bool)
        kept[picked[paired & ~goes_up]] = False
        weights = np.where(chosen >= 0, shift_variance(np.maximum(chosen, 0)), 0.0)
        self._view("variance")[:] += weights * (np.diff(starts) > 1)
        return groups[kept], values[kept], levels[kept]

    def _coins(self, values: FloatArray, starts: IntArray, chosen: IntArray) -> tuple[IntArray, IntArray]:
        """Returns two coins, 0 or 1, per group, from the compacted values and the number of values of the group.

        The first coin chooses the value of a pair that goes up, the second the first value of the first pair.
        """
        words = np.ascontiguousarray(values).view(np.uint64)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(words)])
        words = np.diff(sums[starts]) + self._view("n").view(np.uint64) * np.uint64(64) + chosen.astype(np.uint64)
        both = (finalised(finalised(words, self.seed), self.source) >> np.uint64(62)).astype(np.int64)
        return both >> 1, both & 1

    def _coins_of(self, values: FloatArray, level: int) -> int:
        """Returns the coins of a single group for `halved`, without arrays, and adds the compaction to V."""
        self._state["variance"][0] += shift_variance(level)
        words = np.ascontiguousarray(values).view(np.uint64)
        word = (int(words.sum()) + int(self._state["n"][0]) * 64 + level) % (1 << 64)
        return finalised_word(finalised_word(word, self.seed), self.source) >> 62

    def merge(self, other: Self, codes: IntArray) -> None:
        self._require_equal_parameters(other)
        other = other._compacted_copy()
        groups, values, levels = other._rows
        for name in ("n", "nan", "variance"):
            self._view(name)[codes] += other._view(name)
        for name, better in (("min", np.minimum), ("max", np.maximum)):
            self._view(name)[codes] = better(self._view(name)[codes], other._view(name))
        self._append((codes[groups], values, levels))

    def take(self, groups: IntArray) -> Self:
        """Returns a compacted copy of these groups, in this order."""
        if self._runs:
            return self._compacted_copy().take(groups)
        held, values, levels = self._rows
        result = super().take(groups)
        starts = np.searchsorted(held, np.arange(len(self) + 1))
        counts = np.diff(starts)[groups]
        at = run_indices(starts[groups], counts)
        result._rows = np.repeat(np.arange(len(groups)), counts), values[at], levels[at]
        return result

    def reset(self, groups: IntArray) -> None:
        super().reset(groups)
        emptied = group_mask(groups, len(self))
        self._rows, *runs = (_at(block, ~emptied[block[0]]) for block in (self._rows, *self._runs))
        self._runs = [block for block in runs if len(block[0])]
        self._pending = sum(len(block[0]) for block in self._runs)
        self._compacted_self = None

    def shown(self, asked: Question | None = None) -> tuple[Shape, ...]:
        return (*default_shapes(self, asked), nans(self._view("nan")))

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the answer per group; the default question is the median. NaN where there are no values."""
        self.check(question)
        if self._runs:
            return self._compacted_copy().query(question)
        n = self._view("n")
        match question:
            case Count():
                return Estimates.exact(n)
            case Minimum() | Maximum():
                name = "min" if isinstance(question, Minimum) else "max"
                return Estimates.exact(np.where(n > 0, self._view(name), np.nan))
            case Rank(x, confidence):
                return self._ranks(check_not_nan("x", x), confidence)
            case Quantile(q, confidence):
                return self._quantiles(check_quantile(q), confidence)
        return self._quantiles(0.5, Quantile(0.5).confidence)

    def rank_errors(self, confidence: float = 0.95) -> FloatArray:
        """Returns the maximum error of a rank per group, as a fraction of the group's values."""
        return np.asarray(self._compacted_copy()._errors(confidence) / np.maximum(self._view("n"), 1))

    def _errors(self, confidence: float) -> FloatArray:
        """Returns by how many values a rank may differ from the true rank, float64 per group, at this confidence."""
        return np.asarray(np.sqrt(self._view("variance")) * dominated_quantile(check_confidence(confidence)))

    def _ranks(self, x: float, confidence: float) -> Estimates:
        """Returns the fraction of values that are at most `x`; exact outside the extremes."""
        groups, values, levels = self._rows
        n, errors = self._view("n").astype(np.float64), self._errors(confidence)
        below = np.bincount(groups, np.where(values <= x, 2.0**levels, 0.0), len(self))
        fractions = []
        for rank in (below, below - errors, below + errors):
            inside = np.clip(np.where(errors > 0, np.clip(rank, 1, n - 1), rank), 0, n)
            counted = np.select([x >= self._view("max"), x < self._view("min")], [n, 0.0], inside)
            with np.errstate(invalid="ignore"):
                fractions.append(counted / n)
        value, lower, upper = fractions
        return Estimates(value, np.minimum(lower, value), np.maximum(upper, value), confidence, self.kind)

    def _quantiles(self, q: float, confidence: float) -> Estimates:
        """Returns the value with rank ⌊q·(n - 1)⌋, from 0.

        The bounds are the values at the ranks ± the error of rank.
        """
        groups, values, levels = self._rows
        n, errors = self._view("n"), self._errors(confidence)
        rank = np.floor(q * np.maximum(n - 1, 0))
        starts = np.searchsorted(groups, np.arange(len(self) + 1))
        running = np.concatenate([[0.0], np.cumsum(2.0**levels)])
        base = running[starts[:-1]]
        # At most `rank` values are below `value`, and more than `rank` are at most `value`.
        at = np.searchsorted(running[1:], base + rank, side="right")
        up = np.searchsorted(running[1:], base + rank + errors, side="right")
        down = np.searchsorted(running[:-1], base + rank - errors, side="right") - 1
        padded = np.concatenate([values, [np.nan]])
        least, greatest = self._view("min"), self._view("max")
        end = starts[1:]
        value = np.where(at < end, padded[np.minimum(at, len(values))], greatest)
        upper = np.where(up < end, padded[np.minimum(up, len(values))], greatest)
        lower = np.where(down >= starts[:-1], padded[np.clip(down, 0, len(values))], least)
        lower = np.where(errors > 0, lower, value)
        results = []
        for result in (value, np.minimum(lower, value), np.maximum(upper, value)):
            result = np.where(rank == 0, least, np.where(rank == n - 1, greatest, result))
            results.append(np.where(n > 0, result, np.nan))
        value, lower, upper = results
        return Estimates(value, lower, upper, confidence, self.kind)

    def to_message(self) -> SynopsisMessage:
        groups, values, levels = self._rows
        message = super().to_message()
        counts = np.bincount(groups, minlength=len(self))
        meta = np.array([self.level]), np.array([self.source], np.uint64)
        pending: Block | tuple[()] = concatenated(self._runs) if self._runs else ()
        message.arrays.extend(codec.encode(array) for array in (*meta, counts, values, levels, *pending))
        return message

    @classmethod
    def _decoded(cls, given: dict[str, Any], arrays: list[Any]) -> Self:
        level, source, counts, values, levels, *pending = arrays[len(cls.arrays) :]
        result = super()._decoded({**given, "level": int(level[0]), "source": int(source[0])}, arrays)
        result._rows = np.repeat(np.arange(len(result)), counts), values, levels
        if pending:
            result._runs, result._pending = [(pending[0], pending[1], pending[2])], len(pending[0])
        result._check_state()
        return result

    def _check_state(self) -> None:
        """Raises ValueError unless decoded rows are a valid state."""
        weights = np.zeros(len(self))
        for groups, values, levels in (self._rows, *self._runs):
            if (groups >= len(self)).any():
                raise ValueError("groups out of range")
            if not ((values >= self._view("min")[groups]) & (values <= self._view("max")[groups])).all():
                raise ValueError("values beyond the extremes")
            weights += np.bincount(groups, 2.0**levels, len(self))
        groups, values, _ = self._rows
        ascending = (groups[1:] > groups[:-1]) | (values[1:] >= values[:-1])
        if not ascending.all() or (weights != self._view("n")).any():
            raise ValueError("values out of order, or weights that do not add up to n")


def _at(block: Block, kept: BoolArray) -> Block:
    groups, values, levels = block
    return groups[kept], values[kept], levels[kept]


class Kll(SingleSynopsis[KllStack]):
    """Quantiles within an error of rank: with k = 200 and a single pass, about ±0.6 % of the values at 95 %.

    Args:
        k: 8 to 65536; the error of ranks is proportional to 1/k.
        source: a number that differs between synopses that will be merged.
        seed: seed of the coins. Only synopses of equal k and seed merge.

    >>> import numpy as np
    >>> from edgewater.synopses import Rank
    >>> values = Kll()
    >>> values.update(np.arange(1.0, 100_001.0))
    >>> below = values.query(Rank(50_000.0))
    >>> round(below.lower, 3), round(below.upper, 3)  # 0.5 is true
    (0.497, 0.503)
    """

    stack_type = KllStack

    def __init__(self, k: int = DEFAULT_K, *, source: int = 0, seed: int = DEFAULT_SEED) -> None:
        super().__init__(KllStack(1, k=k, source=source, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, *, source: int = 0, seed: int = DEFAULT_SEED) -> Self:
        """Returns a sketch whose ranks are within ±epsilon of the values at 95 %, for any number of values.

        The worst case is many small merges: V reaches 0.5·n²/k² and the error 1.8/k (measured; 2.5/k is assumed here).
        """
        k = max(math.ceil(WORST_ERROR_TIMES_K / check_fraction("epsilon", epsilon)), MIN_K)
        if k > MAX_K:
            raise InvalidRequest("epsilon", epsilon, f"at least {WORST_ERROR_TIMES_K / MAX_K:.5f}")
        return cls(k, source=source, seed=seed)

    def rank_error(self, confidence: float = 0.95) -> float:
        """Returns the current maximum error of a rank, as a fraction of the values."""
        return float(self.stack.rank_errors(confidence)[0])


register_stack(KllStack, parameters={"k": Parameter.whole(DEFAULT_K, MIN_K, MAX_K)})
