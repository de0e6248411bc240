"""Records have identities: samples of several edges are independent, and a replay draws the same again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Configured, Ingested, SourceEnded, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.records import Position
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate, SampleStack, source_of
from edgewater.wire import QueryRef
from tests.cores import drained
from tests.edge.recovery_world import COLUMNS, flights

SPEC = QuerySpec.from_mapping(
    {
        "name": "samples",
        "from": "flights",
        "where": "distance > 60",
        "group_by": ["carrier"],
        "measures": {
            "uniform": "reservoir(distance, 40)", "some": "bernoulli(distance, rate=0.1)",
            "newest": "fifo(distance, 10)", "biased": "biased(distance, 16)",
        },
        "window": {"tumbling": "1m"},
        "lateness": "1m",
    }
)  # fmt: skip
REF = QueryRef("samples", 1)
DATA = flights(4000, seed=3)


class Edge:
    """An edge over `DATA` in a directory: ingests, pulls and may be opened again."""

    def __init__(self, directory: Path, name: str) -> None:
        spec = StreamSpec(COLUMNS, disorder_ms=2000)
        make = lambda: EdgeCore({"flights": spec}, source_of(name, "i1"))  # noqa: E731
        self.durable = DurableCore(directory, make, self._reread, "i1")
        if not self.durable.core.configured:
            self.durable.handle(SourcesOpened((("flights", "file"),)))
            self.durable.handle(Configured(((REF, SPEC),)))

    def _reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        at = start["row"] if start else 0
        return DATA.slice(at, end["row"] - at)

    def ingest(self, rows: int) -> None:
        at = self.durable.state.positions.get("file", {"row": 0})["row"]
        event = Ingested("flights", "file", DATA.slice(at, rows), (1 << 40) + at)
        self.durable.ingest_range(event, {"row": at}, {"row": at + rows})

    def pull(self) -> list[bytes]:
        """The partials of everything that is pending."""
        return [p.synopsis for frame in drained(self.durable) for p in frame.unpack().partials]

    def finish(self, steps: tuple[int, ...] = (1000, 1000, 1000, 1000)) -> list[bytes]:
        for rows in steps:
            self.ingest(rows)
        self.durable.handle(SourceEnded("flights", "file"))
        return self.pull()


def sample(part: GroupedAggregate, name: str) -> dict[str, list[float]]:
    """Sorted sample per group."""
    stack = part.measures[name]
    assert isinstance(stack, SampleStack)
    return {str(g): sorted(stack.items(i).to_pylist()) for i, g in enumerate(part.rows()[0].to_pylist())}


def merged(parts: list[bytes]) -> GroupedAggregate:
    first, *others = map(GroupedAggregate.from_bytes, parts)
    return first.merge_many(others)


@pytest.mark.parametrize("name", ["uniform", "some", "biased"])
def test_two_edges_with_equal_data_draw_independent_samples(tmp_path: Path, name: str) -> None:
    # Groups of some 1,000 records with 1,440 different values: of two independent samples of 40 or 100 of them
    # some share a value by chance, a tenth at most on average. A biased sample is mostly of the newest, which
    # are the same here, so it is only told apart. The run is seeded: it fails by chance never.
    ours, theirs = (merged(Edge(tmp_path / edge, edge).finish()) for edge in ("jfk", "lga"))
    one, two = sample(ours, name), sample(theirs, name)
    assert one.keys() == two.keys() and one != two
    shared = sum(len(set(one[g]) & set(two[g])) for g in one)
    assert shared < (0.9 if name == "biased" else 0.2) * sum(map(len, one.values()))
    both = ours.merge_many([theirs])
    if name == "uniform":
        assert {len(v) for v in sample(both, name).values()} == {40}
        drawn = np.concatenate(list(sample(both, name).values()))
        from_ours = np.isin(drawn, np.concatenate(list(one.values()))).mean()
        assert 0.25 < from_ours < 0.85, "a merged sample has records of both"


def test_the_same_edge_draws_the_same_sample_however_its_records_came(tmp_path: Path) -> None:
    whole = merged(Edge(tmp_path / "a", "jfk").finish((4000,)))
    parts = merged(Edge(tmp_path / "b", "jfk").finish((17, 983, 2500, 500)))
    for name in ("uniform", "some", "newest", "biased"):
        assert sample(whole, name) == sample(parts, name)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_replay_ships_the_same_bytes(tmp_path: Path, checkpointed: bool) -> None:
    undisturbed = Edge(tmp_path / "whole", "jfk").finish()
    first = Edge(tmp_path / "crashed", "jfk")
    first.ingest(1000)
    if checkpointed:
        first.durable.checkpoint()
    first.ingest(1000)
    first.durable.sync()
    again = Edge(tmp_path / "crashed", "jfk")  # the first one has crashed
    assert again.durable.core.to_state() == first.durable.core.to_state()
    assert again.finish((1000, 1000)) == undisturbed


def test_late_records_have_identities_of_their_own_and_join_the_sample(tmp_path: Path) -> None:
    edge = Edge(tmp_path / "late", "jfk")
    edge.ingest(3000)
    early = edge.pull()
    edge.ingest(1000)
    edge.durable.handle(SourceEnded("flights", "file"))
    late = edge.pull()
    whole = Edge(tmp_path / "whole", "jfk").finish()
    for name in ("uniform", "newest"):
        assert sample(merged(early + late), name) == sample(merged(whole), name)


def test_a_checkpoint_keeps_the_identity_that_records_were_given(tmp_path: Path) -> None:
    core = EdgeCore({"flights": StreamSpec(COLUMNS)}, source_of("jfk", "i1"))
    other = EdgeCore({"flights": StreamSpec(COLUMNS)}, source_of("renamed", "i1"))
    other.restore(core.to_state())
    assert other.source == core.source != source_of("renamed", "i1")


def test_the_source_number_of_a_name_is_stable() -> None:
    assert source_of("jfk", "i1") == 0xD82C8E497BA50F99
    assert source_of("a", "bc") != source_of("ab", "c")


def test_a_process_that_runs_on_a_state_is_known_after_a_crash(tmp_path: Path) -> None:
    edge = Edge(tmp_path, "jfk")
    for number in (7, 9):
        edge.durable.begin_run(number)
    edge.durable.sync()
    assert Edge(tmp_path, "jfk").durable.state.runs == [7, 9]


def test_a_state_that_begins_anew_has_the_positions_and_no_records(tmp_path: Path) -> None:
    edge = Edge(tmp_path, "jfk")
    edge.durable.begin_run(7)
    assert edge.finish()
    edge.durable.begin_anew("i2", source_of("jfk", "i2"))
    edge.durable.close()
    again = Edge(tmp_path, "jfk").durable
    assert (again.incarnation, again.core.source) == ("i2", source_of("jfk", "i2"))
    assert again.state.positions == {"file": {"row": 4000}}
    assert (again.state.records, again.state.runs, list(again.core.unacked)) == ({"flights": 0}, [], [])
