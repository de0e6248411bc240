import math
from pathlib import Path

import pytest

from edgewater.synopses import (
    AnySynopsis,
    Contains,
    Count,
    DDSketch,
    Distinct,
    Frequency,
    GroupedAggregate,
    HyperLogLog,
    Mean,
    Quantile,
    SelfJoinSize,
    SingleSample,
    TopK,
    from_bytes,
)
from edgewater.synopses.encoding import codec
from tests.golden.make import HERE, SAMPLES

FILES = sorted(HERE.glob("*.bin"))
CURRENT = [path for path in FILES if path.stem in SAMPLES]
EARLIER = [path for path in FILES if path.stem not in SAMPLES]


def read(name: str) -> AnySynopsis:
    return from_bytes((HERE / f"{name}.bin").read_bytes())


def test_every_sample_has_its_file() -> None:
    assert {f.stem for f in CURRENT} == set(SAMPLES)


@pytest.mark.parametrize("path", EARLIER, ids=lambda p: p.stem)
def test_samples_of_version_1_are_read_and_have_no_range(path: Path) -> None:
    """Their answers are those of the current version, but for bounds that need the range of all records."""
    old, new = read(path.stem), read(f"{path.stem}-2")
    assert isinstance(old, SingleSample) and isinstance(new, SingleSample)
    assert codec.unseal(path.read_bytes()).version == 1 and codec.unseal(old.to_bytes()).version == 2
    assert old.items() == new.items() and old.records == new.records
    assert from_bytes(old.to_bytes()).to_bytes() == old.to_bytes()
    if not len(new.items()) or new.items().type == "string":
        return
    before, now = old.query(Mean()), new.query(Mean())
    assert before.value == now.value
    assert (before.lower, before.upper) == (-math.inf, math.inf) and math.isfinite(now.upper - now.lower)
    merged = new.merge_many([type(new)._with(old._stack, old.records)])
    assert math.isinf(merged.query(Mean()).upper), "a part whose range is unknown"


@pytest.mark.parametrize("path", CURRENT, ids=lambda p: p.stem)
def test_golden_bytes_round_trip(path: Path) -> None:
    data = path.read_bytes()
    assert from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("path", CURRENT, ids=lambda p: p.stem)
def test_equal_input_gives_the_golden_bytes(path: Path) -> None:
    """Hashes, bin boundaries and encodings of different releases must be equal: edges and center may differ in
    version."""
    assert SAMPLES[path.stem]() == path.read_bytes()


def test_golden_sketches_give_the_expected_answers() -> None:
    dense, collapsed, flights = read("hyperloglog-dense"), read("ddsketch-collapsed"), read("grouped-flights")
    assert isinstance(dense, HyperLogLog) and isinstance(collapsed, DDSketch) and isinstance(flights, GroupedAggregate)
    answer = dense.query(Distinct(0.99))
    assert answer.lower <= 10_000 <= answer.upper and dense.records == 10_000
    assert collapsed.query(Count()).value == 261_120 and 0.001 < collapsed.current_accuracy < 0.0021
    assert collapsed.query(Quantile(0.5)).value == pytest.approx(128.5, rel=0.0021)
    assert len(flights) == 15 and flights.records == 200 == flights.query("n").value.sum()


def test_golden_sketches_of_items_give_the_expected_answers() -> None:
    urls = read("count_min-strings").query(Frequency("日本"))  # type: ignore[arg-type]
    assert urls.lower <= 1 <= urls.upper
    moment = read("fast_agms-integers").query(SelfJoinSize())  # type: ignore[arg-type]
    assert moment.lower <= 5000 <= moment.upper
    assert all(read(f"{kind}-strings").query(Contains("ä")).value == 1 for kind in ("bloom", "cuckoo"))  # type: ignore[arg-type]
    assert read("cuckoo-overfull").overfull  # type: ignore[union-attr]
    counted = read("counting_cuckoo-integers")
    assert counted.query(Frequency(0)).value == 70_000 and counted.query(Count()).value == 71_500  # type: ignore[arg-type]
    top = read("top_k-full")
    assert isinstance(top, TopK) and len(top.top()) == 3 and top.query(Count()).value == 50_000
