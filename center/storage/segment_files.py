"""The frame log's segments. A segment is a file that is written once, as a whole, and deleted as a whole."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path, PurePosixPath

from edgewater.base.errors import StorageError

COMMITS = "commits"
"""The name of the directory of segments."""
SUFFIX = ".frames"
PARTIAL = ".part"


class SegmentDirectory:
    """Segments in a directory of a local or a shared file system. A segment's name is a relative path with ``/``. Any
    number of processes read and append segments.

    Args:
        path: path of the directory, which is created when the first segment is written.
    """

    def __init__(self, path: str | Path) -> None:
        self._root = Path(path)
        self._writer = uuid.uuid4().hex[:12]
        self._count = count(1)

    def append(self, batch: Sequence[bytes]) -> str:
        """Writes the pieces of a batch as a new segment, and returns the name of the segment. The segment is then
        durable. It exists as a whole or not at all, also after a crash.

        Raises:
            OSError: the segment was not written.
        """
        name = f"{COMMITS}/{self._writer}-{next(self._count):08d}{SUFFIX}"
        path = self._root / name
        partial = path.with_suffix(PARTIAL)
        make_directory(path.parent)
        try:
            write_file(partial, [b"".join(batch)])
            os.rename(partial, path)  # noqa: PTH104  (the simulation replaces `os`)
            # The name of the file is durable only after a sync of its directory.
            sync_directory(path.parent)
        except OSError:
            # Deleting the file frees space on a full disk. After a failed fsync the file is not reliable, because a
            # second fsync may succeed without having written the pages.
            for left in (partial, path):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
            raise
        return name

    def read_ranges(self, segment: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns the bytes at each (offset, length). There are fewer bytes at the end of the segment.

        Raises:
            OSError: the segment cannot be read.
            StorageError: the name is not the name of a segment.
        """
        with self._path(segment).open("rb", buffering=0) as file:
            found: dict[tuple[int, int], bytes] = {}
            for begin, end, parts in _joined(ranges):
                data = os.pread(file.fileno(), end - begin, begin)
                found |= {(at, size): data[at - begin : at - begin + size] for at, size in parts}
        return [found[part] for part in ranges]

    def names(self) -> list[str]:
        """Returns the names of all segments, sorted. Raises OSError."""
        return sorted(path.relative_to(self._root).as_posix() for path in self._root.glob(f"*/*{SUFFIX}"))

    def delete(self, segment: str) -> None:
        """Deletes a segment. A missing segment is ignored. Raises OSError, and StorageError as `read_ranges`."""
        self._path(segment).unlink(missing_ok=True)

    def delete_partial(self) -> None:
        """Deletes the incomplete segments of crashed writers. If a living writer loses a segment in this way, it gets
        an OSError.
        """
        for path in self._root.glob(f"{COMMITS}/*{PARTIAL}"):
            path.unlink(missing_ok=True)

    def _path(self, segment: str) -> Path:
        parts = PurePosixPath(segment)
        if parts.is_absolute() or ".." in parts.parts or len(parts.parts) != 2:
            raise StorageError(f"frame log: {segment!r} is not a segment of this log")
        return self._root / segment


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Joins adjacent ranges. Returns begin and end of each joined range, and the ranges in it."""
    joined: list[tuple[int, int, list[tuple[int, int]]]] = []
    for offset, length in sorted(set(ranges)):
        if joined and joined[-1][1] == offset:
            begin, end, parts = joined.pop()
            joined.append((begin, end + length, [*parts, (offset, length)]))
        else:
            joined.append((offset, offset + length, [(offset, length)]))
    return joined


def write_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes a new file. Its contents are then durable, and its name after `sync_directory`. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        at = 0
        for piece in pieces:
            view = memoryview(piece)
            while view:
                written = os.pwrite(descriptor, view, at)
                view, at = view[written:], at + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Creates a directory durably, with its parents, unless it exists. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def is_lost(error: OSError, root: Path) -> bool:
    """Returns whether a file that is missing is lost: its root has other files.

    If the root is empty, a volume is probably not mounted.
    """
    return isinstance(error, FileNotFoundError) and root.is_dir() and any(root.iterdir())


def sync_directory(directory: Path) -> None:
    """Makes the names of the files in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
