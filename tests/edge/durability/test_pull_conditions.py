"""What a pull depends on is in the journal: recovery builds the same frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from edge.core import Configured, EdgeCore, Ingested, PullEvent, SourcesOpened, StreamSpec
from edge.durability import DurableCore
from edgewater.base.streams import TIME_COLUMN
from edgewater.wire import QueryRef
from tests.cores import pulled
from tests.edge.hard_state import hard_state
from tests.query_specs import query_spec

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
