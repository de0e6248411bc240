"""`merge_bytes` gives the same bytes as `from_bytes`, `merge_many` and `to_bytes`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, UnsupportedVersion
from edgewater.synopses import (
    BernoulliSample,
    BiasedReservoir,
    BloomFilter,
    CountMin,
    CuckooFilter,
    DDSketch,
    EquiDepthHistogram,
    EquiWidthHistogram,
    FastAgms,
    FifoSample,
    HyperLogLog,
    Kll,
    ReservoirSample,
    TopK,
    from_bytes,
    merge_bytes,
)
from edgewater.synopses.encoding import codec

MAKERS: dict[str, Any] = {
    "hll-dense": lambda i: HyperLogLog(6),
    "hll-sparse": lambda i: HyperLogLog(14),
    "hll-mixed": lambda i: HyperLogLog(9),
    "count-min-dense": lambda i: CountMin(16, 3),
    "count-min-sparse": lambda i: CountMin(4096, 2),
    "count-min-mixed": lambda i: CountMin(256, 4),
    "fast-agms": lambda i: FastAgms(64, 3),
    "bloom": lambda i: BloomFilter(512, 3),
    "cuckoo": lambda i: CuckooFilter(1 << 12),
    "equi-width": lambda i: EquiWidthHistogram(-1000, 1000, 50),
    "equi-depth": lambda i: EquiDepthHistogram(8),
    "ddsketch": lambda i: DDSketch(0.02),
    "kll": lambda i: Kll(16, source=i),
    "reservoir": lambda i: ReservoirSample(40, source=i),
    "fifo": lambda i: FifoSample(40, source=i),
    "biased": lambda i: BiasedReservoir(32, source=i),
    "bernoulli": lambda i: BernoulliSample(0.5, source=i, limit=200),
    "top-k": lambda i: TopK(5, capacity=20),
}
SIZES = (300, 0, 1, 700, 300, 300, 5000, 300, 40, 40, 40, 40, 60_000, 300, 700, 2)


def parts_of(make: Any, sizes: tuple[int, ...] = SIZES, scale: float = 1.0) -> list[Any]:
    rng = np.random.default_rng(11)
    parts = []
    for number, size in enumerate(sizes):
        parts.append(make(number))
        parts[-1].update(np.round(rng.normal(0, 300, min(size, 5000) if make(0).kind == "cuckoo" else size)) * scale)
    return parts


def one_by_one(data: list[bytes]) -> bytes:
    first, *others = (from_bytes(part) for part in data)
    return first.merge_many(others).to_bytes()  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [pytest.param(m, id=n) for n, m in MAKERS.items()])
def test_merge_bytes_equals_merge_many(make: Any) -> None:
    data = [part.to_bytes() for part in parts_of(make)]
    merged = merge_bytes(data)
    assert merged == one_by_one(data)
    assert from_bytes(merged).to_bytes() == merged
    assert merge_bytes(data[:1]) == data[0]


@pytest.mark.parametrize("damaged", [0, 3])
def test_a_damaged_partial_is_refused_with_its_number(damaged: int) -> None:
    data = [part.to_bytes() for part in parts_of(lambda i: HyperLogLog(6), (200,) * 4)]
    flipped = bytearray(data[damaged])
    flipped[-1] ^= 4
    data[damaged] = bytes(flipped)
    with pytest.raises(CorruptSynopsis, match=f"^partial {damaged + 1} of 4: "):
        merge_bytes(data)


def test_a_partial_with_other_parameters_is_refused_with_its_number() -> None:
    data = [part.to_bytes() for part in parts_of(lambda i: HyperLogLog(6), (200,) * 4)]
    for stranger in (HyperLogLog(10), CountMin(16, 3)):
        with pytest.raises(IncompatibleSynopses, match=r"^partial 3 of 4: "):
            merge_bytes([*data[:2], stranger.to_bytes(), *data[3:]])


@pytest.mark.parametrize("make", [lambda i: HyperLogLog(6), lambda i: CountMin(16, 3)])
def test_counters_out_of_range_under_a_valid_checksum_are_refused(make: Any) -> None:
    data = [part.to_bytes() for part in parts_of(make, (200,) * 20)]
    message = codec.unseal(data[6])
    values = bytearray(message.arrays[-1].data)
    values[3] = 120
    message.arrays[-1].data = bytes(values)
    data[6] = codec.seal(message)
    with pytest.raises(CorruptSynopsis, match=r"^partial 7 of 20: "):
        merge_bytes(data)


def test_a_newer_partial_and_an_empty_list_are_refused() -> None:
    data = [part.to_bytes() for part in parts_of(lambda i: HyperLogLog(6), (200,) * 8)]
    message = codec.unseal(data[2])
    message.version = 9
    data[2] = codec.seal(message)
    with pytest.raises(UnsupportedVersion, match=r"^partial 3 of 8: .*version 9"):
        merge_bytes(data)
    with pytest.raises(ValueError, match="at least one"):
        merge_bytes([])
