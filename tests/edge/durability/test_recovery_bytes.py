"""Frames are the same bytes whatever checkpoints were taken and read back, also of synopses that order changes.

Values of `kll` and `top_k` wait to be compacted many together, and what was compacted together decides the coins and
the cuts that follow. So a checkpoint must neither compact, nor forget what waits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge.core.events import Configured, SourcesOpened
from edgewater.wire import QueryRef
from tests.edge.recovery_world import Center, World, flights
from tests.query_specs import query_spec

pytestmark = pytest.mark.nightly

DATA = flights(600, seed=3)
QUERIES = tuple(
    (
        QueryRef(name, 1),
        query_spec(
            name=name,
            stream="flights",
            group_by=groups,
            measures={
                "ranks": "kll(distance, k=8)",
                "most": "top_k(distance, k=3)",
                "some": "reservoir(distance, size=5)",
                "quantiles": "quantiles(distance, accuracy=0.2)",
                "different": "distinct(distance, precision=5)",
            },
            window={"tumbling": "20s"},
            lateness="30s",
        ),
    )
    for name, groups in (("grouped", ["carrier"]), ("whole", []))
)


class OrderedWorld(World):
    """The same edge, with measures whose bytes depend on the order of updates."""

    queries = QUERIES

    def configure(self) -> None:
        if not self.edge.core.configured:
            self.edge.handle(SourcesOpened((("flights", "file"),)))
            self.edge.handle(Configured(self.queries))


def run(directory: Path, center: Center, between: Callable[[OrderedWorld], OrderedWorld]) -> dict[int, int]:
    """Ingests in small batches and ships now and then; `between` is called after each batch. Sequence -> CRC32C."""
    world = OrderedWorld(directory, DATA, center)
    world.configure()
    batch = 0
    while world.row < DATA.num_rows:
        world.ingest(31)
        world = between(world)
        batch += 1
        if batch % 5 == 0:
            world.pull(2000)
            world = between(world)
            world.ship()
    world.finish()
    return {seq: frame.crc32c for seq, frame in center.frames.items()}


def test_an_edge_restored_from_a_checkpoint_builds_the_same_bytes(tmp_path: Path) -> None:
    def read_back(world: OrderedWorld) -> OrderedWorld:
        world.edge.checkpoint()
        return OrderedWorld(world.edge.directory, DATA, world.center)

    plain = run(tmp_path / "plain", Center(), lambda world: world)
    assert run(tmp_path / "read-back", Center(), read_back) == plain
