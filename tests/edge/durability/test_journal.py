from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.durability import journal
from edge.durability.journal import MAGIC, Record, Segment
from edgewater.base.errors import StorageError

RECORDS = [Record(1, b"first"), Record(2, b""), Record(3, b"x" * 1000), Record(4, b"last")]
WHOLE = MAGIC + b"".join(journal.encode(r) for r in RECORDS)


def test_synced_records_are_read_back_in_order(tmp_path: Path) -> None:
    segment = Segment(tmp_path / "j")
    for record in RECORDS:
        segment.append(record)
    assert segment.unsynced_bytes == len(WHOLE)
    segment.sync()
    assert segment.unsynced_bytes == 0
    assert journal.scan((tmp_path / "j").read_bytes()).records == RECORDS


def test_unsynced_records_are_not_on_disk(tmp_path: Path) -> None:
    segment = Segment(tmp_path / "j")
    segment.append(RECORDS[0])
    segment.sync()
    segment.append(RECORDS[1])
    assert journal.scan((tmp_path / "j").read_bytes()).records == RECORDS[:1]


def test_a_segment_cut_anywhere_gives_the_complete_records_before_the_cut() -> None:
    for cut in range(len(WHOLE)):
        found = journal.scan(WHOLE[:cut])
        assert found.records == RECORDS[: len(found.records)]
        assert found.good_bytes + found.torn_bytes == cut
        assert not found.damaged


@given(st.integers(len(MAGIC), len(WHOLE) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_yields_a_record_that_was_not_written(at: int, mask: int) -> None:
    data = bytearray(WHOLE)
    data[at] ^= mask
    found = journal.scan(bytes(data))
    assert all(record in RECORDS for record in found.records)
    assert len(found.records) < len(RECORDS)


def test_a_damaged_record_is_counted_and_the_ones_behind_it_are_read() -> None:
    data = bytearray(WHOLE)
    data[len(MAGIC) + 10] ^= 1  # inside the first record's payload
    found = journal.scan(bytes(data))
    assert found.damaged == [len(MAGIC)]
    assert found.records == RECORDS[1:]


def test_a_file_with_another_beginning_is_damaged_and_nothing_of_it_is_truncated() -> None:
    found = journal.scan(b"something else")
    assert (found.damaged, found.torn_bytes, found.good_bytes) == ([0], 0, len(b"something else"))


@pytest.mark.parametrize("data", [b"", MAGIC[:2], bytes(4), bytes(4096)])
def test_a_file_that_was_never_written_completely_is_one_torn_tail(data: bytes) -> None:
    found = journal.scan(data)
    assert (found.damaged, found.torn_bytes) == ([], len(data))


def test_after_a_full_disk_the_next_sync_writes_all_appended_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = Segment(tmp_path / "j")
    segment.append(RECORDS[0])
    segment.sync()
    segment.append(RECORDS[1])
    real, calls = os.pwrite, 0

    def short_then_full(file: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(file, data[:3], offset)  # a torn write
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", short_then_full)
        with pytest.raises(StorageError):
            segment.sync()
    segment.append(RECORDS[2])
    segment.sync()
    assert journal.scan((tmp_path / "j").read_bytes()).records == RECORDS[:3]


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    journal.write_durably(path, b"old")
    (tmp_path / "checkpoint.partial").mkdir()
    with pytest.raises(StorageError):
        journal.write_durably(path, b"new")
    assert path.read_bytes() == b"old"
