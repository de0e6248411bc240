"""A replay applies the recorded frames: it needs nothing that policies remember, and no input that is gone.

What a pull depends on is in the journal, so recovery builds the same frames.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.core.core import EdgeCore
from edge.core.events import Configured, Ingested, PullEvent, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.records import InputGone, Position
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.synopses.encoding.state import State
from edgewater.wire import QueryRef
from tests.cores import pulled
from tests.edge.durability.test_replay_elsewhere import DATA, KINDS, MAPPING, KindWorld
from tests.edge.hard_state import LEARNED, hard_state
from tests.edge.recovery_world import COLUMNS
from tests.query_specs import query_spec

pytestmark = pytest.mark.slow


class Forgetful(EdgeCore):
    """Restores other memories of policies than the checkpoint has."""

    rng = np.random.default_rng(0)

    def restore(self, data: bytes) -> None:
        state = State.unpack(data, "edge-core")
        state.numbers.update(
            {"served_bytes": int(self.rng.integers(1 << 20)), "first_pulls": int(self.rng.integers(5))}
        )
        for query in state.components.values():
            query.components["shipper"].numbers["entry_bytes"] = float(self.rng.uniform(2.0, 90.0))
            for slice_ in query.components["store"].components["slices"].components.values():
                slice_.numbers[LEARNED] = [bool(self.rng.integers(2)), int(self.rng.integers(60_000))]
                queue = slice_.components["send_queue"]
                queue.numbers[2] += int(self.rng.integers(-2, 3))
                queue.arrays["groups"] = self.rng.permutation(queue.arrays["groups"])
        super().restore(state.pack("edge-core"))


@pytest.fixture(scope="module", params=KINDS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The journal of a run with a checkpoint in its middle, and the state at its end."""
    directory = tmp_path_factory.mktemp("recorded")
    world = KindWorld(directory, QuerySpec.from_mapping(MAPPING | KINDS[request.param]))
    assert world.run(checkpoint_at=115) > 10
    world.edge.sync()
    world.edge.close()
    return directory, hard_state(world.edge.core)


@pytest.mark.nightly
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_replay_without_the_memory_of_policies_gives_the_same_state(
    recorded: tuple[Path, dict[str, Any]], seed: int
) -> None:
    directory, state = recorded
    copy = directory.parent / f"{directory.name}-copy"
    shutil.copytree(directory, copy)
    try:
        core = type("Core", (Forgetful,), {"rng": np.random.default_rng(seed)})
        again = DurableCore(copy, lambda: core({"flights": StreamSpec(COLUMNS, disorder_ms=2000)}), reread, "first")
        again.close()
        assert hard_state(again.core) == state and again.diverged == []
    finally:
        shutil.rmtree(copy)


def reread(source: str, start: Position | None, end: Position) -> pa.RecordBatch:
    at = start["row"] if start else 0
    return DATA.slice(at, end["row"] - at)


def test_every_kind_of_query_recovers_without_its_input(recorded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    directory, _ = recorded
    shutil.copytree(directory, tmp_path / "state")

    def gone(source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        if start and start["row"] % 2:
            raise InputGone("the file is gone")
        return reread(source, start, end)

    def core() -> EdgeCore:
        return EdgeCore({"flights": StreamSpec(COLUMNS, disorder_ms=2000)})

    edge = DurableCore(tmp_path / "state", core, gone, "first")
    assert edge.state.losses and edge.core.unacked
    edge.close()


GROUPS, NOW_MS = 2_000, 5_000
SPEC = query_spec(group_by=["key"], window={"tumbling": "10s"})


def durable(directory: Path) -> DurableCore:
    batch = pa.record_batch({"key": np.arange(GROUPS), TIME_COLUMN: np.arange(GROUPS) * NOW_MS // GROUPS})

    def reread(*_: Any) -> pa.RecordBatch:
        return batch

    edge = DurableCore(directory, lambda: EdgeCore({"s": StreamSpec({"key": pa.int64()})}), reread, "i")
    if not edge.core.configured:
        edge.handle(SourcesOpened((("s", "f"),), ("f",)))
        edge.handle(Configured(((QueryRef("q", 1), SPEC),)))
        edge.ingest_range(Ingested("s", "f", batch, NOW_MS), {"row": 0}, {"row": GROUPS})
        edge.handle(PullEvent(4 << 10))
    return edge


def test_early_sends_by_the_median_of_the_link_are_replayed(tmp_path: Path) -> None:
    edge = durable(tmp_path)
    pull = PullEvent(4 << 10, edge.core.pulls.event_times(NOW_MS), 1_000.0, mid_bytes_s=2_000.0)
    assert pulled(edge, pull)
    edge.sync()
    state = hard_state(edge.core)
    edge.close()
    again = durable(tmp_path)
    assert again.diverged == []
    assert hard_state(again.core) == state
    again.close()
