"""Targets: partials of every function that a query may name, and every kind of synopsis that `from_bytes` reads.

A partial is processed like an edge's partial: the gateway's check, a merge with honest partials, answers, and the
merged bytes. These have to be readable again; otherwise one partial would make the partials of all edges unreadable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from bench.hostile.mutate import mutated_synopsis
from bench.hostile.targets import Target, register
from edgewater.base.errors import IncompatibleSynopses, InvalidRequest, SynopsisError
from edgewater.base.streams import TIME_COLUMN
from edgewater.guard.partial_check import PartialCheck, PartialFacts
from edgewater.model.query import QuerySpec
from edgewater.synopses import (
    BernoulliSample,
    BiasedReservoir,
    BloomFilter,
    CountingCuckooFilter,
    CountMin,
    CuckooFilter,
    DDSketch,
    EquiDepthHistogram,
    EquiWidthHistogram,
    FastAgms,
    FifoSample,
    GeneralManager,
    GroupedAggregate,
    HaarWavelet,
    HyperLogLog,
    Kll,
    MaxErrorWavelet,
    Point,
    RangeSum,
    ReservoirSample,
    SliceManager,
    TopK,
    from_bytes,
    merge_bytes,
)
from edgewater.synopses.encoding import codec
from edgewater.synopses.testing import Subject

COLUMNS = {"word": pa.string(), "number": pa.int64(), "amount": pa.float64(), "flag": pa.bool_()}
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "count": ("count()", "count(number)"),
    "sum": ("sum(number)", "sum(amount)"),
    "min": ("min(number)", "min(amount)"),
    "max": ("max(number)", "max(amount)"),
    "mean": ("mean(number)", "mean(amount)"),
    "var": ("var(number)", "var(amount)"),
    "distinct": ("distinct(word, precision=4)", "distinct(number, precision=7)"),
    "quantiles": ("quantiles(amount)", "quantiles(number, accuracy=0.1)"),
    "kll": ("kll(amount, k=8)", "kll(number, k=30)"),
    "top_k": ("top_k(word, 2, capacity=3)", "top_k(amount, 3)", "top_k(flag)"),
    "count_min": ("count_min(word, width=16, depth=2)", "count_min(number, width=64, depth=1)"),
    "fast_agms": ("fast_agms(word, width=16, depth=3)", "fast_agms(flag, width=16, depth=1)"),
    "bloom": ("bloom(word, bits=64, hashes=2)", "bloom(amount, bits=256, hashes=3)"),
    "cuckoo": ("cuckoo(word, buckets=2)", "cuckoo(number, buckets=64)"),
    "counting_cuckoo": ("counting_cuckoo(word, buckets=2)", "counting_cuckoo(number, buckets=64)"),
    "reservoir": ("reservoir(word, 3)", "reservoir(amount, 8)"),
    "fifo": ("fifo(word, 3)", "fifo(flag, 8)"),
    "biased": ("biased(amount, 4)", "biased(number, 16)"),
    "bernoulli": ("bernoulli(amount, 0.5, limit=4)", "bernoulli(word, 0.9)"),
    "equi_width": ("equi_width(amount, 0, 10, buckets=8)",),
    "equi_depth": ("equi_depth(amount, buckets=4)",),
    "kmeans": ("kmeans(number, amount, 2, limit=6)",),
    "exact_quantile": ("exact_quantile(amount, 0.5, limit=9)",),
}  # fmt: skip
GROUP_BY: tuple[tuple[str, ...], ...] = (("word",), ("number", "flag"), ())


def batch(rows: int, seed: int) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)

    def column(values: Any, of: pa.DataType) -> pa.Array:
        return pa.array(values, of, mask=rng.random(rows) < 0.05)

    amounts = np.where(
        rng.random(rows) < 0.05, rng.choice([np.nan, np.inf, -np.inf, 1e300, -0.0], rows), rng.normal(3, 4, rows)
    )
    return pa.record_batch(
        {
            "word": column([f"w{i}ж"[: 2 + i % 2] for i in rng.integers(0, 8, rows)], pa.string()),
            "number": column(rng.integers(-3, 6, rows) * 10 ** rng.integers(0, 17, rows), pa.int64()),
            "amount": column(amounts, pa.float64()),
            "flag": column(rng.random(rows) < 0.5, pa.bool_()),
            TIME_COLUMN: np.arange(rows),
        }
    )


def partial(spec: QuerySpec, rows: int, seed: int) -> bytes:
    """Returns the partial that an edge ships for records."""
    bound, records = spec.bind(COLUMNS), batch(rows, seed)
    stacks = {m.measure.name: m.measure.stack(m.argument.type if m.argument else None) for m in bound.measures}
    aggregate = GroupedAggregate(dict(zip(spec.group_by, bound.group_types, strict=True)), stacks)
    aggregate.set_source(seed)
    values = {m.measure.name: m.argument.array(records) if m.argument else None for m in bound.measures}
    keys = [records.column(name) for name in spec.group_by]
    aggregate.update(keys, values, rows, times=np.arange(rows), ids=np.arange(rows))
    return aggregate.take(np.arange(len(aggregate))).to_bytes()


@dataclass
class Partials:
    """The way of the partials of one function, of several queries. A mutant belongs to the query with the same
    parameters, or to the first query.
    """

    calls: tuple[str, ...]
    checks: list[PartialCheck] = field(default_factory=list)
    honest: list[list[bytes]] = field(default_factory=list)
    numbers: dict[tuple[str, ...], int] = field(default_factory=dict)

    def corpus(self) -> list[bytes]:
        for call in self.calls:
            for group_by in GROUP_BY:
                measures = {"m": call, "n": "count()"}
                query = {"name": "q", "from": "s", "window": {"tumbling": "1s"}, "measures": measures}
                spec = QuerySpec.from_mapping({**query, "group_by": list(group_by)} if group_by else query)
                honest = [partial(spec, rows, seed) for seed, rows in enumerate((0, 1, 12, 60))]
                self.numbers[_header(honest[0])] = len(self.checks)
                self.checks.append(PartialCheck.of(spec))
                self.honest.append(honest)
        return [data for held in self.honest for data in held]

    def check(self, data: bytes) -> PartialFacts:
        """Runs the gateway's check alone."""
        return self.checks[self.numbers.get(_header(data), 0)].check(data)

    def limit(self, data: bytes) -> int | None:
        """Returns four times the decoded bytes, twice for the answers; None for bytes that the check refuses."""
        try:
            return 8 * self.check(data).state_bytes + (4 << 20)
        except SynopsisError:
            return None

    def run(self, data: bytes) -> None:
        number = self.numbers.get(_header(data), 0)
        error = None
        try:
            self.checks[number].check(data)
        except SynopsisError as exc:
            # The job does not get it, but frames that are older than the check may contain it.
            error = exc
        _, one, few, many = self.honest[number]
        partials = [few, data, many, one]
        try:
            aggregate = GroupedAggregate.from_bytes(data)
        except SynopsisError:
            _require_refused(partials)
            raise
        evaluate(aggregate)
        try:
            merged = GroupedAggregate.merge_bytes(partials)
        except IncompatibleSynopses:
            return
        assert merged == GroupedAggregate.merge_one_by_one(partials), "read as one stack, partials merge to other bytes"
        try:
            again = GroupedAggregate.from_bytes(merged)
        except SynopsisError as exc:
            raise AssertionError(f"merged with honest partials it cannot be read: {exc}") from exc
        evaluate(again)
        again.take(np.arange(len(again))).to_bytes()
        if error is not None:
            raise error


def _require_refused(partials: list[bytes]) -> None:
    """Raises AssertionError if a merge accepts a partial that is refused by itself."""
    with suppress(SynopsisError):
        GroupedAggregate.merge_bytes(partials)
        raise AssertionError("merged with honest partials, what is refused by itself is accepted")


def _header(data: bytes) -> tuple[str, ...]:
    message = codec.unseal(data)
    return (message.parameters, *(text for part in message.parts[:1] for text in (part.kind, part.parameters)))


def evaluate(aggregate: GroupedAggregate) -> None:
    aggregate.rows()
    for stack in aggregate.measures.values():
        answers(stack)


def answers(stack: Any) -> None:
    """Asks all questions that a stack answers."""
    for of in ("float64", "string"):
        try:
            Subject("mutant", lambda: stack, of).answers(stack)
        except InvalidRequest:
            continue  # items of another type, or a sample of strings
        except KeyError:
            stack.query(None)  # a question of two stacks
    if hasattr(stack, "top"):
        stack.top()
    if hasattr(stack, "sampled"):
        stack.sampled()


@dataclass
class Singles:
    """The way of one kind of synopsis through `from_bytes` and `merge_bytes`."""

    make: Callable[[int], Any]
    honest: list[bytes] = field(default_factory=list)

    def corpus(self) -> list[bytes]:
        self.honest = [self.make(seed).to_bytes() for seed in range(26)]
        return self.honest[:4]

    def run(self, data: bytes) -> None:
        synopsis = from_bytes(data)
        ask(synopsis)
        for partials in (
            [self.honest[0], data],
            [self.honest[0], *[data] * 3, *self.honest[1:4]],
            [*self.honest, data],
        ):
            try:
                merged = merge_bytes(partials)
            except IncompatibleSynopses:
                continue
            try:
                again = from_bytes(merged)
            except SynopsisError as exc:
                raise AssertionError(f"merged with honest synopses it cannot be read: {exc}") from exc
            ask(again)
        synopsis.to_bytes()


def ask(synopsis: Any) -> None:
    if isinstance(synopsis, GroupedAggregate):
        return evaluate(synopsis)
    stack = getattr(synopsis, "stack", None)
    if stack is not None:
        return answers(stack)
    for question in (None, Point(0), RangeSum(0, 0), RangeSum(0, max(min(synopsis.records, 1 << 40) - 1, 0))):
        try:
            synopsis.query(question)
        except InvalidRequest:
            continue
    return None


def _filled(synopsis: Any, seed: int, kind: str = "float") -> Any:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 60))
    if kind == "signal":
        synopsis.update(rng.normal(0, 3, rows))
    elif kind == "string":
        synopsis.update(pa.array([f"w{i}" for i in rng.integers(0, 20, rows)]))
    else:
        synopsis.update(rng.lognormal(0, 1, rows) * rng.choice([-1, 1], rows))
    return synopsis


def _manager(seed: int) -> SliceManager:
    return SliceManager([(seed * 10 + i, _filled(HaarWavelet(4), seed + i, "signal")) for i in range(2)])


def _general(seed: int) -> GeneralManager:
    return GeneralManager(64, 2, [(seed, _filled(MaxErrorWavelet(3), seed, "signal"))])


KINDS: dict[str, Callable[[int], Any]] = {
    "hyperloglog": lambda seed: _filled(HyperLogLog(4), seed, "string"),
    "ddsketch": lambda seed: _filled(DDSketch(0.05), seed),
    "count_min": lambda seed: _filled(CountMin(16, 2), seed, "string"),
    "fast_agms": lambda seed: _filled(FastAgms(16, 3), seed, "string"),
    "bloom": lambda seed: _filled(BloomFilter(128, 2), seed, "string"),
    "cuckoo": lambda seed: _filled(CuckooFilter(64), seed, "string"),
    "counting_cuckoo": lambda seed: _filled(CountingCuckooFilter(64), seed, "string"),
    "top_k": lambda seed: _filled(TopK(2, 3), seed, "string"),
    "reservoir": lambda seed: _filled(ReservoirSample(5, source=seed), seed),
    "bernoulli": lambda seed: _filled(BernoulliSample(0.5, limit=4, source=seed), seed),
    "fifo": lambda seed: _filled(FifoSample(4, source=seed, quota=2), seed),
    "biased_reservoir": lambda seed: _filled(BiasedReservoir(4, source=seed, p_in=0.7), seed),
    "equi_width": lambda seed: _filled(EquiWidthHistogram(-3, 3, 8), seed),
    "equi_depth": lambda seed: _filled(EquiDepthHistogram(4), seed),
    "kll": lambda seed: _filled(Kll(8, source=seed), seed),
    "haar": lambda seed: _filled(HaarWavelet(4), seed, "signal"),
    "haar_max": lambda seed: _filled(MaxErrorWavelet(4), seed, "signal"),
    "slice_manager": _manager,
    "general_manager": _general,
}


def _targets() -> Sequence[Target]:
    found = []
    for name, calls in FUNCTIONS.items():
        checks, way = Partials(calls), Partials(calls)
        found.append(Target(f"check/{name}", checks.corpus, checks.check, mutated_synopsis))
        found.append(Target(f"partial/{name}", way.corpus, way.run, mutated_synopsis, limit=way.limit))
    for name, make in KINDS.items():
        single = Singles(make)
        found.append(Target(f"single/{name}", single.corpus, single.run, mutated_synopsis, limit=lambda _: None))
    return found


for _target in _targets():
    register(_target)
