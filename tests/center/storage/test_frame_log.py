from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.storage import segment_files as segments
from center.storage.frame_log import (
    FrameEntry,
    FrameLocation,
    FrameLog,
    StoredFrame,
    decode_fetched,
    decode_record,
    encode_record,
)
from edgewater.base.errors import StorageError
from edgewater.base.streams import EdgeId
from edgewater.wire import Partial, QueryRef
from tests.center.kept_frames import read_frame

MILES, HOURS = QueryRef("miles", 1), QueryRef("hours", 3)


def stored(seq: int = 0, query: QueryRef = MILES, size: int = 100, edge: str = "jfk") -> StoredFrame:
    return StoredFrame(query, EdgeId(edge), "i1", seq, (Partial(0, os.urandom(size)), Partial(1_000, b"")))


def read(log: FrameLog, location: FrameLocation) -> StoredFrame:
    return read_frame(log, location.segment, location.offset, location.length)


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
    reader = FrameLog(tmp_path / "log")
    assert [read(reader, at) for at in locations] == frames
    assert [decode_fetched(at, found) for at, found in zip(locations, reader.fetch(locations), strict=True)] == frames
    assert reader.segments() == [locations[0].segment], "a commit is one segment, of all queries"
    assert reader.queries(locations[0].segment) == {"miles@1", "hours@3"}


def test_a_commit_is_one_file_and_two_fsyncs_whatever_the_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, synced, fsync = FrameLog(tmp_path), list[int](), os.fsync
    log.append([stored(0)])
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor)))
    log.append([stored(n, QueryRef(f"q{n}", 1)) for n in range(500)])
    assert (len(synced), len(log.segments())) == (2, 2)


def test_a_reader_makes_nothing_on_disk(tmp_path: Path) -> None:
    assert FrameLog(tmp_path / "log").segments() == []
    assert not (tmp_path / "log").exists()


def test_records_of_a_query_lie_one_after_another(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    first, other, second = log.append([stored(0), stored(1, HOURS), stored(2)])
    assert (first.offset, second.offset) == (other.offset + other.length, first.offset + first.length)


def test_two_writers_in_one_directory_never_share_a_segment(tmp_path: Path) -> None:
    logs = [FrameLog(tmp_path), FrameLog(tmp_path)]
    frames = [stored(0), stored(1)]
    locations = [log.append([f])[0] for log, f in zip(logs, frames, strict=True)]
    assert locations[0].segment != locations[1].segment
    assert [read(logs[0], at) for at in locations] == frames


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:4] + b"\x09" + data[5:], "of version 9; this release reads b'EWLG' of version 1"),
        (lambda data: b"PK" + data[2:], "a segment b'PKLG'"),
        (lambda data: data[:20] + b"?" + data[21:], "the table's CRC32C is wrong"),
        (lambda data: data[:7], "its table cannot be read"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, change: Callable[[bytes], bytes], problem: str
) -> None:
    log = FrameLog(tmp_path)
    (at,) = log.append([stored()])
    path = tmp_path / at.segment
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StorageError, match=f"(?s){at.segment}.*{re.escape(problem)}"):
        log.queries(at.segment)


def test_a_copy_of_a_damaged_record_has_its_bytes_and_its_query(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    at, _ = log.append([stored(0), stored(1, HOURS)])
    path = tmp_path / at.segment
    data = bytearray(path.read_bytes())
    data[at.offset + 20] ^= 1
    path.write_bytes(data)
    entry = FrameEntry(MILES, 1, EdgeId("jfk"), "i1", 0, 7, at.segment, at.offset, at.length, 1, 1)
    copy = log.copy(entry)
    assert log.fetch([copy]) == log.fetch([at]) and log.queries(copy.segment) == {"miles@1"}
    log.remove(at.segment)
    with pytest.raises(StorageError, match="CRC32C"):
        read(log, copy)


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
    os.truncate(root / torn.segment, torn.offset + int(cut * torn.length))
    assert read(log, kept).seq == 0
    with pytest.raises(StorageError, match=f"{torn.segment} at {torn.offset}"):
        read(log, torn)


class Crash(BaseException):
    """A process that dies: nothing handles it."""


@pytest.mark.parametrize("step", ["pwrite", "fsync", "rename", "close"])
def test_a_commit_that_is_cut_leaves_no_segment_and_the_next_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    log = FrameLog(tmp_path)
    kept, _ = log.append([stored(0), stored(1, HOURS)])

    def die(descriptor: int, data: bytes = b"", offset: int = 0) -> None:
        if step == "pwrite":
            os.truncate(descriptor, len(data) // 2)
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(segments.os, step, die)
        log.append([stored(2), stored(3, HOURS)])
    after = FrameLog(tmp_path)
    assert after.segments() == [kept.segment]
    assert len(list(tmp_path.rglob("*.part"))) == 1
    after.remove_partial()
    assert list(tmp_path.rglob("*.part")) == []
    (again,) = after.append([stored(2)])
    assert [read(after, at).seq for at in (kept, again)] == [0, 2]


def test_a_writer_that_loses_its_partial_segment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, other, fsync = FrameLog(tmp_path), FrameLog(tmp_path), os.fsync

    def clean_up_meanwhile(descriptor: int) -> None:
        fsync(descriptor)
        other.remove_partial()

    log.append([stored(0)])
    with monkeypatch.context() as patch, pytest.raises(FileNotFoundError):
        patch.setattr(os, "fsync", clean_up_meanwhile)
        log.append([stored(1)])
    (at,) = log.append([stored(1)])
    assert read(log, at).seq == 1


def test_a_missing_or_foreign_segment_is_a_storage_error(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    for segment in ("miles@1/gone", "../secret", "/etc/passwd", "miles@1/../../x"):
        with pytest.raises(StorageError, match="frame log"):
            read_frame(log, segment, 0, 10)


def test_a_query_name_that_leaves_the_log_is_no_path(tmp_path: Path) -> None:
    (at,) = FrameLog(tmp_path / "log").append([stored(0, QueryRef("../../etc", 1))])
    assert [path.relative_to(tmp_path / "log").as_posix() for path in tmp_path.rglob("*.frames")] == [at.segment]


def test_removing_a_segment_twice_is_harmless(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    (at,) = log.append([stored()])
    log.remove(at.segment)
    log.remove(at.segment)
    with pytest.raises(StorageError, match="cannot be read"):
        read(log, at)


def test_a_disk_that_fills_up_in_the_middle_of_a_commit_loses_nothing_and_gets_the_space_back(tmp_path: Path) -> None:
    log = FrameLog(tmp_path)
    (kept,) = log.append([stored(0, size=3_000)])
    batch = [stored(1, size=3_000), stored(2, HOURS, size=3_000)]
    with file_size_limit(5_000):
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                log.append(batch)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()] == [kept.segment]
    again = log.append(batch)
    assert [read(log, at).seq for at in (kept, *again)] == [0, 1, 2]


@pytest.mark.parametrize("failing", [1, 2])
def test_after_a_failed_fsync_of_file_or_directory_the_segment_is_never_trusted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    log, fsync, calls = FrameLog(tmp_path), os.fsync, list[int]()
    (kept,) = log.append([stored(0)])

    def refuse(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(os, "fsync", refuse)
        log.append([stored(1)])
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()] == [kept.segment]
    (again,) = log.append([stored(1)])
    assert [read(log, at).seq for at in (kept, again)] == [0, 1]
