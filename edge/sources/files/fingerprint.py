"""Finds the file of a position after the file was renamed, copied, compressed, replaced or truncated."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import re
import signal
import stat
from collections.abc import Callable, Iterable
from errno import EAGAIN
from pathlib import Path

from edge.codecs.decompression import CODECS, HEAD_BYTES
from edge.sources.files.position import FileId, FilePosition

_ROTATION = re.compile(r"(?:[._-]\d[\dT:_.-]*)+$")
_DATE = re.compile(r"[._-]\d[\dT:_.-]{5,}$")

Contains = Callable[[str, FilePosition], bool]
"""Returns whether a file still begins with all bytes before a position (`FileReader.contains`). False if there is no
file at the path.
"""


def matching_files(pattern: str) -> list[str]:
    """Returns the files that match a glob pattern, in name order."""
    return sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())  # noqa: PTH207


def identity_of(path: str) -> FileId | None:
    """Returns the device and the inode of the file at a path; None if there is no such file."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def locate(position: FilePosition, contains: Contains, *, by_content: bool) -> str | None:
    """Returns the path where a position's file is now, or else the path of a copy; None if neither exists.

    The file is identified by device, inode and content. Its old name is tried first, and then the other files of its
    directory, because log rotation renames files in place. Another file that begins with the same content may have
    replaced it at its path.

    Args:
        by_content: accept the file at the old path even if the position has no digest. Only for files that are not
            rotated.
    """
    path = path_of(position)
    if path is not None and contains(path, position):
        return path
    if (by_content or has_digest(position)) and contains(position.file, position):
        return position.file
    return find_copy(position, contains)


def path_of(position: FilePosition) -> str | None:
    """Returns the path of the position's file in its directory; None if the file is not there."""
    paths = (position.file, *_neighbours(position.file))
    return next((path for path in paths if position.is_at(identity_of(path))), None)


def find_copy(position: FilePosition, contains: Contains) -> str | None:
    """Returns the path of another file in the same directory with all bytes before the position; None if there is none.

    Log rotation may copy or compress a file (`is_rotated_name`).
    """
    if not identifies_content(position):
        return None
    return next((path for path in _neighbours(position.file) if _is_copy(path, position, contains)), None)


def is_rotated_name(path: str, original: str) -> bool:
    """Returns whether rotation or compression may have given this path to the file that had the path `original`.

    The paths differ only by numbers or dates at the end, by a date before the extension, and by the codec's extension.
    """
    return Path(path).parent == Path(original).parent and _stem(path) == _stem(original)


def _stem(path: str) -> str:
    """Returns a name without the parts that rotation adds."""
    name = Path(path).name
    name = name.removesuffix(Path(name).suffix) if Path(name).suffix in CODECS else name
    name = _ROTATION.sub("", name)
    root, dot, extension = name.rpartition(".")
    return _DATE.sub("", root) + dot + extension if root else name


def files_named_after(name: str, renamed: str) -> dict[FileId, str]:
    """Returns files that may have had a name after an earlier file of this name was renamed, as identity -> path.

    Such files lie in the same directory, their names begin with `name`, and they were written later than the earlier
    file.

    Args:
        name: the path that the earlier file had.
        renamed: the path of the earlier file now.
    """
    found: dict[FileId, str] = {}
    with contextlib.suppress(OSError):
        written_ns = Path(renamed).stat().st_mtime_ns
        for path in _neighbours(name):
            status = Path(path).stat()
            later = stat.S_ISREG(status.st_mode) and status.st_mtime_ns > written_ns
            if later and path not in (name, renamed) and path.startswith(name):
                found[status.st_dev, status.st_ino] = path
    return found


def has_digest(position: FilePosition) -> bool:
    """Returns whether the digest of a position tells whether another file begins with the bytes before the position."""
    return position.digest is not None and position.offset > 0


def identifies_content(position: FilePosition) -> bool:
    """Returns whether equal content before the position proves that a file is a copy. Short files may be equal by
    chance.
    """
    return position.offset >= HEAD_BYTES and position.tail[0] > 0


def _is_copy(path: str, position: FilePosition, contains: Contains) -> bool:
    try:
        is_other = is_rotated_name(path, position.file) and not position.is_at(identity_of(path))
        return is_other and Path(path).is_file() and contains(path, position)
    except OSError:  # the file was deleted, or the process may not read it
        return False


def _neighbours(path: str) -> Iterable[str]:
    folder = Path(path).parent
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]  # noqa: PTH118, PTH208
    except OSError:
        return []


BEGINNING_BYTES = 4_096  # limit: what is read to recognise a file
"""The smallest size of a file that gets a fingerprint. Shorter beginnings, such as header lines, may be equal by
chance.
"""


class InputFingerprints:
    """Fingerprints of the files of a source. By them the center recognises files that two sources read.

    A fingerprint is a hash below 2^62 of the first `BEGINNING_BYTES` of a file on disk. Each file is read once.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, FileId], int] = {}

    def of(self, position: FilePosition, most: int) -> tuple[int, ...]:
        """Returns the fingerprints of the files of a position, ascending. Blocks while it reads files.

        Args:
            most: the largest number of fingerprints. The smallest ones are returned, so that two edges with the same
                files return the same ones.
        """
        files = {(p.file, p.identity): p for p in (position, *position.others)}
        self._known = {file: known for file, known in self._known.items() if file in files}
        for file in files.keys() - self._known.keys():
            if (fingerprint := _fingerprint(files[file])) is not None:
                self._known[file] = fingerprint
        return tuple(sorted(set(self._known.values()))[:most])


def _fingerprint(position: FilePosition) -> int | None:
    """Returns the fingerprint of a file; None if the file is too short or no longer at its path."""
    try:
        with Path(position.file).open("rb") as file:
            data, status = file.read(BEGINNING_BYTES), os.fstat(file.fileno())
            if len(data) < BEGINNING_BYTES or not position.is_at((status.st_dev, status.st_ino)):
                return None
    except OSError:
        return None
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 2


def current_path(descriptor: int) -> str | None:
    """Returns the path that an open file has now; None if the file was deleted or the system does not tell."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return None
    status = os.fstat(descriptor)
    return path if identity_of(path) == (status.st_dev, status.st_ino) else None


def has_writer(descriptor: int) -> bool | None:
    """Returns whether any process has the file open for writing; None if the system does not tell.

    The check takes a read lease, which the kernel grants only if nobody has the file open for writing. It needs the
    file's owner or CAP_LEASE.
    """
    try:
        # A process that opens the file for writing breaks the lease, which is signalled. This signal is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as exc:
        return True if exc.errno == EAGAIN else None
    except AttributeError:  # not Linux
        return None
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
