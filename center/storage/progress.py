"""The progress of processes, in files that outlive the processes: the query that each thread works on, and its number
of steps.

A file is mapped into memory. A write takes a microsecond, and the file stays when its process is killed. The next
leading process reads which queries dead processes worked on. The supervisor reads whether the number of steps
increases.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from center.storage.query_partition import ALL_QUERIES, QueryPartition

_TRACK = struct.Struct("<QB119s")


class Track(IntEnum):
    """The work of one thread."""

    MAIN = 0
    LEDGER = 1
    FUNCTIONS = 2


@dataclass(frozen=True, slots=True)
class TrackState:
    """The state of a track.

    Attributes:
        steps: number of steps. It increases while the track works.
        is_live: whether the track must make steps all the time.
        query: key of the query that the track works on; empty if there is none.
    """

    steps: int
    is_live: bool
    query: str


_SIZE = len(Track) * _TRACK.size


def progress_path(directory: Path, pid: int) -> Path:
    return directory / f"{pid}.progress"


def read_progress(path: Path) -> dict[Track, TrackState]:
    """Returns the tracks of a file. Returns no tracks if the file is missing or incomplete."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    if len(data) != _SIZE:
        return {}
    tracks = {}
    for track in Track:
        steps, is_live, text = _TRACK.unpack_from(data, track * _TRACK.size)
        tracks[track] = TrackState(steps, bool(is_live), text.rstrip(b"\0").decode(errors="replace"))
    return tracks


def write_whole(path: Path, text: str) -> None:
    """Writes a small file atomically. A reader sees either the old text or the new text."""
    partial = path.with_suffix(".new")
    partial.write_text(text, encoding="ascii")
    partial.replace(path)


class DriverProgress:
    """Writes the progress file of this process. Each track has one thread at a time.

    Args:
        directory: directory with the files of all drivers of this machine.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._path = directory, progress_path(directory, os.getpid())
        # A process with the same id may have died before. In a container, each process has the same id.
        self._left = _queries(read_progress(self._path))
        self._path.unlink(missing_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._release = weakref.finalize(self, os.close, file)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.posix_fallocate(file, 0, _SIZE)  # without it, a write to the map of a file on a full disk is a SIGBUS
        self._map = mmap.mmap(file, _SIZE)
        self._steps = dict.fromkeys(Track, 0)

    def take_left(self, partition: QueryPartition = ALL_QUERIES) -> list[str]:
        """Returns the queries that dead processes of a partition worked on. Each query is returned only once."""
        left: list[str] = []
        if any(query in partition for query in self._left):
            left, self._left = self._left, []
        for path in sorted(self._directory.glob("*.progress")):
            if path == self._path:
                continue
            with contextlib.suppress(OSError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails while the file's process lives
                queries = _queries(read_progress(path))
                if not queries or any(query in partition for query in queries):
                    left += queries
                    path.unlink()
        return list(dict.fromkeys(left))

    def enter(self, track: Track, query: str) -> None:
        """Records that a track begins to work on a query. `Track.FUNCTIONS` may take any time without a step."""
        self._write(track, query, is_live=track is not Track.FUNCTIONS)

    def step(self, track: Track) -> None:
        """Records that a track makes a step and works on no query."""
        self._write(track, "", is_live=track is not Track.FUNCTIONS)

    def rest(self, track: Track) -> None:
        """Records that a track has no work and makes no steps."""
        self._write(track, "", is_live=False)

    def close(self) -> None:
        """Removes the file. Called when the process ends without an error."""
        if self._release.alive:
            self._path.unlink(missing_ok=True)
            self._release()

    def _write(self, track: Track, query: str, *, is_live: bool) -> None:
        self._steps[track] += 1
        at = track * _TRACK.size
        self._map[at : at + _TRACK.size] = _TRACK.pack(self._steps[track], is_live, query.encode()[:119])


class NoProgress(DriverProgress):
    """A `DriverProgress` without a file."""

    def __init__(self) -> None:
        pass

    def _write(self, track: Track, query: str, *, is_live: bool) -> None:
        pass


def _queries(tracks: dict[Track, TrackState]) -> list[str]:
    return [state.query for state in tracks.values() if state.query]
