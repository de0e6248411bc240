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
    Quantile,
    SelfJoinSize,
    TopK,
    from_bytes,
)
from tests.golden.synopses import SAMPLES
from tests.golden.write import SETS

NEWEST = sorted((SETS[-1] / "synopses").glob("*.bin"))
FILES = [path for golden in SETS for path in sorted((golden / "synopses").glob("*.bin"))]


def read(name: str) -> AnySynopsis:
    return from_bytes((SETS[-1] / "synopses" / f"{name}.bin").read_bytes())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden_bytes_round_trip(path: Path) -> None:
    data = path.read_bytes()
    assert from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("path", [p for p in NEWEST if p.stem in SAMPLES], ids=lambda p: p.stem)
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


def test_a_sketch_from_which_more_was_subtracted_than_it_contained_has_no_bounds() -> None:
    answer = read("count_min-overdrawn").query(Frequency(-5))  # type: ignore[arg-type]
    assert answer.value < 0 and (answer.lower, answer.upper) == (-math.inf, math.inf)
    assert "more was subtracted" in answer.basis


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
