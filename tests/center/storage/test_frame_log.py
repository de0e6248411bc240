from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.storage import frame_log
from center.storage.frame_log import FrameLocation, FrameLog, StoredFrame, decode_record, encode_record
from edgewater.errors import StorageError
from edgewater.streams import EdgeId
from edgewater.wire import Frame, FrameBody, Partial, QueryRef

MILES, HOURS = QueryRef("miles", 1), QueryRef("hours", 3)


def stored(seq: int = 0, query: QueryRef = MILES, size: int = 100, edge: str = "jfk") -> StoredFrame:
    body = FrameBody(1_000, (Partial(0, 0, os.urandom(size)),))
    return StoredFrame(EdgeId(edge), "i1", Frame.pack(seq, query, body))


def read(log: FrameLog, location: FrameLocation) -> StoredFrame:
    return log.read(location.segment, location.offset, location.length)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Makes the kernel refuse to let any file of this process grow beyond `size`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_appended_is_read_back_by_another_process_view(tmp_path: Path) -> None:
    log = FrameLog(tmp_path / "log")
    frames = [stored(0), stored(1, HOURS), stored(2), stored(3, HOURS, edge="lga")]
    locations = log.append(frames)
    log.sync()
    reader = FrameLog(tmp_path / "log")
    assert [read(reader, at) for at in locations] == frames
    assert [at.segment.split("/")[0] for at in locations] == ["miles@1", "hours@3", "miles@1", "hours@3"]
    log.close()


def test_a_reader_makes_nothing_on_disk(tmp_path: Path) -> None:
    FrameLog(tmp_path / "log").close()
    assert not (tmp_path / "log").exists()


def test_records_of_a_batch_lie_one_after_another(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    first, second = log.append([stored(0), stored(1)])
    (third,) = log.append([stored(2)])
    assert (second.offset, third.offset) == (first.length, first.length + second.length)
    log.close()


def test_a_full_segment_is_followed_by_the_next(tmp_path: Path) -> None:
    log = FrameLog(tmp_path, segment_bytes=1_000, writer="w")
    frames = [stored(n, size=300) for n in range(10)]
    locations = log.append(frames[:7]) + log.append(frames[7:])
    log.close()
    assert len({at.segment for at in locations}) > 3
    assert all((tmp_path / at.segment).stat().st_size <= 1_000 for at in locations)
    assert [read(log, at) for at in locations] == frames


def test_a_frame_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    log = FrameLog(tmp_path, segment_bytes=100)
    locations = log.append([stored(0, size=300), stored(1, size=300)])
    assert len({at.segment for at in locations}) == 2
    log.close()


def test_more_queries_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_log, "MAX_OPEN_SEGMENTS", 3)
    log = FrameLog(tmp_path)
    frames = [stored(n, QueryRef(f"q{n % 7}", 1)) for n in range(21)]
    locations = [at for f in frames for at in log.append([f])]
    log.sync()
    assert [read(log, at) for at in locations] == frames
    log.close()


def test_two_writers_in_one_directory_never_share_a_segment(tmp_path: Path) -> None:
    logs = [FrameLog(tmp_path), FrameLog(tmp_path)]
    frames = [stored(0), stored(1)]
    locations = [log.append([f])[0] for log, f in zip(logs, frames, strict=True)]
    assert locations[0].segment != locations[1].segment
    assert [read(logs[0], at) for at in locations] == frames
    for log in logs:
        log.close()


def test_every_flipped_byte_of_a_record_is_found(tmp_path: Path) -> None:
    record = encode_record(stored())
    for i in range(len(record)):
        damaged = bytearray(record)
        damaged[i] ^= 0x10
        with pytest.raises(StorageError, match="miles@1/w at 0"):
            decode_record(bytes(damaged), "miles@1/w at 0")


@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_torn_record_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    root = tmp_path_factory.mktemp("log")
    log = FrameLog(root)
    kept, torn = log.append([stored(0), stored(1)])
    log.close()
    os.truncate(root / torn.segment, torn.offset + int(cut * torn.length))
    assert read(log, kept).frame.seq == 0
    with pytest.raises(StorageError, match=f"{torn.segment} at {torn.offset}"):
        read(log, torn)


def test_appending_goes_on_behind_a_torn_tail(tmp_path: Path) -> None:
    crashed = FrameLog(tmp_path)
    (kept,) = crashed.append([stored(0)])
    crashed.close()
    with (tmp_path / kept.segment).open("ab") as file:
        file.write(encode_record(stored(1))[:50])
    log = FrameLog(tmp_path)
    (after,) = log.append([stored(1)])
    log.sync()
    assert [read(log, at).frame.seq for at in (kept, after)] == [0, 1]
    log.close()


def test_a_missing_or_foreign_segment_is_a_storage_error(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    for segment in ("miles@1/gone", "../secret", "/etc/passwd", "miles@1/../../x"):
        with pytest.raises(StorageError, match="frame log"):
            log.read(segment, 0, 10)


def test_a_query_name_that_leaves_the_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not a query's name"):
        FrameLog(tmp_path / "log").append([stored(0, QueryRef("../../etc", 1))])


def test_removing_a_segment_twice_is_harmless(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    (at,) = log.append([stored()])
    log.close()
    log.remove(at.segment)
    log.remove(at.segment)
    with pytest.raises(StorageError, match="cannot be read"):
        read(log, at)


def test_a_disk_that_fills_up_in_the_middle_of_a_record_loses_nothing_that_was_synced(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    (kept,) = log.append([stored(0, size=3_000)])
    log.sync()
    batch = [stored(1, size=3_000), stored(2, size=3_000)]
    with file_size_limit(5_000), pytest.raises(OSError, match="File too large"):
        log.append(batch)
    assert (tmp_path / kept.segment).stat().st_size == kept.length, "the torn tail is given back to the disk"
    again = log.append(batch)
    log.sync()
    assert [read(log, at).frame.seq for at in (kept, *again)] == [0, 1, 2]
    assert kept.segment not in {at.segment for at in again}
    log.close()


def test_a_disk_that_stays_full_is_not_littered_with_segments(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    with file_size_limit(100):
        for _ in range(5):
            with pytest.raises(OSError, match="File too large"):
                log.append([stored(0, size=3_000)])
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_after_a_failed_fsync_the_segment_is_never_trusted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FrameLog(tmp_path)
    (kept,) = log.append([stored(0)])
    log.sync()
    (lost,) = log.append([stored(1)])

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(os, "fsync", refuse)
        log.sync()
    log.sync()
    with pytest.raises(StorageError):
        read(log, lost)
    (again,) = log.append([stored(1)])
    log.sync()
    assert again.segment != kept.segment
    assert [read(log, at).frame.seq for at in (kept, again)] == [0, 1]
    log.close()
