"""The state directory: its identity, its lock, and the names of its files.

- ``identity.json``: the incarnation, the format and the release of the state.
- ``checkpoint-N.ckpt``: the state before ``journal-N.log``.
- ``journal-N.log``: the events after the checkpoint.
- ``quota.json``: see `edge.durability.quota_file`.
- ``edge.lock``: the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edge.durability import journal
from edgewater.base.errors import StorageError
from edgewater.runtime.state_release import RELEASE, require_format

IDENTITY = "identity.json"
STATE_FORMAT = 1  # format: of the state directory
"""The format of checkpoints and journals. Increment it with each change after which an older release cannot read new
data, or this release cannot read old data.
"""
COUNTED_AGAIN = "records that its sources have delivered are then counted again"


def load_identity(directory: Path, fresh: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Loads the identity of a state directory, which never changes.

    The file also has the format of the state, and the last release that wrote the state.

    Args:
        fresh: returns the identity of a new directory.

    Raises:
        StorageError: the directory cannot be used, or the identity is damaged.
        IncompatibleState: the state has another format.
    """
    path = directory / IDENTITY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_identity(directory, fresh() | {"format": STATE_FORMAT})
        identity = json.loads(path.read_text())
        if not isinstance(identity.get("incarnation"), str):
            raise ValueError("it has no incarnation")
        written = None if "format" not in identity else (int(identity["format"]), str(identity.get("release")))
    except OSError as exc:
        raise StorageError(f"state_dir {directory} cannot be used: {exc.strerror or exc}") from exc
    except (ValueError, AttributeError) as exc:
        raise StorageError(
            f"{path} is damaged ({exc}). Restore it from a copy, or remove {directory} to start over: {COUNTED_AGAIN}"
        ) from exc
    require_format(
        f"state_dir {directory}", written, STATE_FORMAT, f"remove the directory to start over: {COUNTED_AGAIN}"
    )
    return dict(identity)


def write_identity(directory: Path, identity: Mapping[str, Any]) -> None:
    """Writes the identity, with this release. Raises StorageError."""
    journal.write_durably(directory / IDENTITY, json.dumps({**identity, "release": RELEASE}).encode())


@contextlib.contextmanager
def lock_state_dir(directory: Path) -> Iterator[None]:
    """Locks the state directory, so that two edges never share a journal. Raises StorageError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "edge.lock").open("a")
    except OSError as exc:
        raise StorageError(f"state_dir {directory} cannot be used: {exc.strerror or exc}") from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise StorageError(
                f"state_dir {directory} is in use by another `edgewater edge run`; give each edge its own"
            ) from exc
        yield


def checkpoint_path(directory: Path, number: int) -> Path:
    return directory / f"checkpoint-{number}.ckpt"


def journal_path(directory: Path, number: int) -> Path:
    return directory / f"journal-{number}.log"


def numbered_files(directory: Path) -> list[tuple[Path, int]]:
    """Returns the checkpoints and journals with their numbers, ascending."""
    names = re.compile(r"(?:checkpoint|journal)-(\d+)\.(?:ckpt|log)")
    matches = ((path, names.fullmatch(path.name)) for path in directory.iterdir())
    return sorted(((path, int(match[1])) for path, match in matches if match), key=lambda file: file[1])


def remove_before(directory: Path, number: int) -> None:
    """Removes the checkpoints and journals with lower numbers."""
    for path, old in numbered_files(directory):
        if old < number:
            path.unlink(missing_ok=True)
    journal.sync_directory(directory)
