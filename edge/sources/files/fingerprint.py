"""Finds a file again that may have been renamed, replaced or truncated since it was last read."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

import google_crc32c

from edge.sources.files.position import FilePosition


def matching_files(pattern: str) -> list[str]:
    """Returns the files that match a glob pattern, in name order."""
    return sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())  # noqa: PTH207


def inode_of(path: str) -> int | None:
    """Returns the inode of the file at a path; None if there is no such file."""
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None


def has_head(path: str, head: tuple[int, int]) -> bool:
    """Returns whether the file's first `head[0]` bytes have the CRC32C `head[1]`."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            start = file.read(head[0])
    except OSError:
        return False
    return len(start) == head[0] and google_crc32c.value(start) == head[1]


def locate(position: FilePosition, *, by_content: bool) -> str | None:
    """Returns the current path of a position's file; None if it was not found.

    The file is identified by inode and fingerprint, first under its name and then among the files of
    the same directory, because log rotation renames files in place.

    Args:
        by_content: also accept a file of the same name and fingerprint with another inode, such as a
            restored copy; for files that are not rotated.
    """
    path = position.file
    if _is(path, position) or (by_content and inode_of(path) is not None and has_head(path, position.head)):
        return path
    return next((near for near in _neighbours(path) if _is(near, position)), None)


def _is(path: str, position: FilePosition) -> bool:
    return inode_of(path) == position.inode and has_head(path, position.head)


def _neighbours(path: str) -> Iterable[str]:
    folder = Path(path).parent
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]  # noqa: PTH118, PTH208
    except OSError:
        return []
