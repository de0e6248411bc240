from __future__ import annotations

from center.storage.query_partition import ALL_QUERIES, QueryPartition


def test_each_query_is_in_one_partition_with_all_its_versions() -> None:
    partitions = QueryPartition.all(4)
    for number in range(200):
        keys = [f"q{number}@{version}" for version in (1, 2, 30)]
        (own,) = [p for p in partitions if keys[0] in p]
        assert all(key in own for key in keys)
    sizes = [sum(f"q{number}@1" in p for number in range(200)) for p in partitions]
    assert min(sizes) > 25, sizes
    assert all(f"q{number}@1" in ALL_QUERIES for number in range(200))


def test_the_division_is_the_same_in_every_process_and_release() -> None:
    # Two drivers with another division would both apply the frames of a query.
    assert [n for n in range(12) if f"q{n}@1" in QueryPartition(0, 3)] == [2, 7, 10]


def test_a_partition_is_read_as_it_is_written() -> None:
    for partition in QueryPartition.all(3):
        assert QueryPartition.parse(str(partition)) == partition
    for text in ("", "1", "1 of ", "x of 2", "1 of 2 of 3"):
        assert QueryPartition.parse(text) is None


def test_names_of_an_undivided_store_are_plain() -> None:
    assert ALL_QUERIES.name("driver") == "driver"
    assert [p.name("driver") for p in QueryPartition.all(2)] == ["driver 1 of 2", "driver 2 of 2"]
