"""A state of 0.3.0 with batches that queries have not processed is refused; without such batches it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edge.core.core import QUEUED
from edge.core.events import Ingested
from edge.durability import journal
from edge.durability.event_records import RAN, payload_record, range_record
from edge.durability.journal import Record, Segment
from edge.durability.state_dir import checkpoint_path
from edgewater.base.errors import StorageError
from edgewater.synopses.encoding.state import State
from tests.edge.recovery_world import Center, World, flights

DATA = flights(160, seed=1)


def stopped(directory: Path) -> World:
    """The state of an edge that has read some records and has stopped."""
    world = World(directory, DATA, Center())
    world.configure()
    world.ingest(50)
    world.edge.checkpoint()
    world.edge.close()
    return world


def queued(record: Record) -> Record:
    """The record as 0.3.0 has written it for a batch that was queued."""
    at = 4 if record.payload[4:5] == b"{" else 0
    length = int.from_bytes(record.payload[:4], "little") if at else len(record.payload)
    head = json.dumps({**json.loads(record.payload[at : at + length]), "queued": True}).encode()
    rest = record.payload[at + length :]
    return Record(record.kind, (len(head).to_bytes(4, "little") if at else b"") + head + rest)


def ranges(event: Ingested) -> Record:
    return range_record(event, {"row": 50}, {"row": 60})


def payloads(event: Ingested) -> Record:
    return payload_record(event, None, None, None)


@pytest.mark.parametrize("record", [ranges, payloads])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_journal_with_queued_batches_is_refused(
    tmp_path: Path, record: Callable[[Ingested], Record], is_queued: bool
) -> None:
    stopped(tmp_path)
    segment = Segment(max(tmp_path.glob("journal-*.log")))
    made = record(Ingested("flights", "file", DATA.slice(50, 10), 1 << 40))
    segment.append(queued(made) if is_queued else made)
    segment.append(Record(RAN, b'{"queries":[["exact",1]],"through":55}'))
    segment.sync()
    segment.close()
    if is_queued:
        with pytest.raises(StorageError) as caught:
            World(tmp_path, DATA, Center())
        assert caught.value.message == QUEUED
    else:
        assert World(tmp_path, DATA, Center()).edge.core.streams["flights"].records == 60


def test_a_checkpoint_with_queued_batches_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path)
    path = checkpoint_path(tmp_path, 1)
    whole = State.unpack(path.read_bytes(), "edge-checkpoint")
    core = State.unpack(whole.arrays["core"], "edge-core")
    with_queues = State({**core.numbers, "queues": {"flights": [[], {}]}}, core.arrays, core.components)
    whole.arrays["core"] = with_queues.pack("edge-core")
    journal.write_durably(path, whole.pack("edge-checkpoint"))
    with pytest.raises(StorageError) as caught:
        World(tmp_path, DATA, Center())
    assert caught.value.message == QUEUED
