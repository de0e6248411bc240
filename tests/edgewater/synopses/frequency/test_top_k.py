from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest
from edgewater.synopses import Count, Distinct, Frequency, ItemRanking, Synopsis, TopK, from_bytes
from edgewater.synopses.encoding import codec
from tests.refusals import refused

SEED = 15


def words(n: int, skew: float = 1.2, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).zipf(skew, n) % 100_000


def test_a_story_of_one_summary() -> None:
    top: TopK = TopK(2)
    assert isinstance(top, Synopsis) and isinstance(top.stack, ItemRanking)
    top.update(pa.array(["/", "/a", None, "/", "/b", "/", "/a"]))
    (first, often), (second, _) = top.top()
    assert (first, second) == ("/", "/a") and (often.lower, often.value, often.upper) == (3, 3, 3)
    assert top.query(Frequency("/c")).value == 0 and top.query(Count()).value == 6
    other = TopK(2)
    other.update(["/b"] * 5)
    both = top.merge_many([other])
    assert [item for item, _ in both.top(3)] == ["/b", "/", "/a"]
    again = from_bytes(both.to_bytes())
    assert isinstance(again, TopK) and again.top() == both.top()
    assert TopK().top() == [] and TopK().query(Frequency("x")).upper == 0


def assert_bounds(top: TopK, truth: Counter, capacity: int) -> None:
    """Checks the deterministic bounds of every item."""
    n = truth.total()
    error = int(top.query(Frequency(-1)).upper)
    assert error <= n / (capacity + 1)
    listed = dict(top.top(capacity))
    for item, given in listed.items():
        assert given.lower <= truth[item] <= given.upper == given.value == given.lower + error
    assert all(count <= error for item, count in truth.items() if item not in listed)
    assert top.query(Count()).value == n


@pytest.mark.parametrize("skew", [1.05, 1.5, 3.0])
@pytest.mark.parametrize("batches", [1, 30])
@pytest.mark.parametrize("capacity", [1, 20, 1000])
def test_bounds_hold_for_every_item(skew: float, batches: int, capacity: int) -> None:
    values = words(100_000, skew)
    top = TopK(1, capacity)
    for part in np.array_split(values, batches):
        top.update(part)
    assert_bounds(top, Counter(values.tolist()), capacity)


@pytest.mark.parametrize("order", ["row", "tree"])
def test_bounds_hold_for_256_merged_partials_of_different_sites(order: str) -> None:
    rng = np.random.default_rng(SEED)
    truth: Counter = Counter()
    parts = []
    for site in range(256):
        values = words(int(rng.integers(1, 2000)), 1.3, site) + (site % 4) * 3  # differs between sites
        truth.update(values.tolist())
        parts.append(TopK(10, 100))
        parts[-1].update(values)
    while len(parts) > 1:
        parts = [parts[0].merge_many(parts[1:])] if order == "row" else [
            left.merge_many([right]) for left, right in zip(parts[::2], parts[1::2], strict=True)
        ]  # fmt: skip
    assert_bounds(parts[0], truth, 100)
    found = {item for item, _ in parts[0].top()}
    assert all(item in found for item, count in truth.most_common(3) if count > truth.total() / 50)


def test_an_item_above_the_bound_always_has_a_counter() -> None:
    """The worst case: one competitor per counter, and the frequent item in small batches among new items."""
    top = TopK(1, 9)
    for piece in range(1000):
        top.update(np.concatenate([np.full(12, -1), 1000 * piece + np.arange(88)]))
    (item, often), = top.top()  # fmt: skip
    assert item == -1 and often.lower <= 12_000 <= often.upper and 12_000 > 100_000 / 10
    assert often.upper - often.lower <= 10_000


def test_counts_of_few_items_are_exact() -> None:
    values = np.random.default_rng(SEED).integers(0, 50, 20_000)
    whole, parts = TopK(5), [TopK(5) for _ in range(4)]
    whole.update(values)
    for part, share in zip(parts, np.array_split(values, 4), strict=True):
        part.update(share)
    merged = parts[2].merge_many([parts[0], parts[3], parts[1]])
    assert merged.to_bytes() == whole.to_bytes()
    truth = Counter(values.tolist())
    assert [(i, int(e.value)) for i, e in whole.top()] == [(i, truth[i]) for i, _ in whole.top()] and {
        int(e.value) for _, e in whole.top()
    } == {n for _, n in truth.most_common(5)}


def test_zeros_and_nan_are_one_item_each() -> None:
    top = TopK(3)
    top.update(np.array([0.0, -0.0, np.nan, -np.nan, np.nan, 1.0]))
    items = {str(item): estimate.value for item, estimate in top.top()}
    assert items == {"nan": 3, "0.0": 2, "1.0": 1}


def test_sizes_and_bad_parameters() -> None:
    assert TopK.for_error(0.01, 5).stack.capacity == 100 and TopK().stack.capacity == 1000
    assert TopK.for_error(0.5, 20).stack.capacity == 20, "at least k"
    for k, capacity in ((0, None), (5, 4), (5, 1 << 21), (True, None), (2.0, None)):
        with refused(InvalidRequest, "k" if capacity is None else "capacity"):
            TopK(k, capacity)  # type: ignore[arg-type]
    with refused(InvalidRequest, "k"):
        TopK(5).top(51)
    with refused(InvalidRequest, "epsilon"):
        TopK.for_error(1e-9)
    with refused(InvalidRequest, "question"):
        TopK().query(Distinct())
    with pytest.raises(IncompatibleSynopses):
        TopK(1).merge_many([TopK(1, 20)])


def test_invalid_counters_are_corrupt() -> None:
    top = TopK(2, 3)
    top.update([1, 1, 2, 3])
    sound = top.stack.to_message()
    damage = {1: [3], 2: [-1], 3: [2], 4: [1, 1, 0]}
    for array, values in damage.items():
        message = type(sound)()
        message.CopyFrom(sound)
        message.arrays[array].CopyFrom(codec.encode(np.array(values)))
        with pytest.raises(CorruptSynopsis):
            from_bytes(codec.seal(message))
    sound.arrays[5].CopyFrom(codec.encode_keys(pa.array(["a", "b", "c"])))
    with pytest.raises(CorruptSynopsis):
        from_bytes(codec.seal(sound))
