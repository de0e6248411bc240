"""Stored partials of a query's slices, in a file that tasks read. The driver writes the file and deletes it.

The file is beside the log's segments, which executors can read. After a crash, the next gateway deletes it with the
incomplete segments. A task that finds no file fails, and the driver writes it again.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from center.storage.segment_files import COMMITS, PARTIAL
from edgewater.model.errors import StorageError


@dataclass(frozen=True, slots=True, order=True)
class SliceSpan:
    """The slices of a query that start in [from_ms, to_ms)."""

    key: str
    from_ms: int
    to_ms: int


@dataclass(frozen=True, slots=True)
class SpilledSpan:
    """The partials of a span, in a file.

    Attributes:
        file: path of the file relative to the log.
        ids: of each partial in the store, in the order of the file.
        sizes: bytes of each partial.
        most_bytes: the largest merge that is wanted.
    """

    span: SliceSpan
    file: str
    ids: tuple[int, ...]
    sizes: tuple[int, ...]
    most_bytes: int

    def read(self, log_dir: Path) -> Iterator[bytes]:
        """Yields the partials. Raises StorageError."""
        try:
            with (log_dir / self.file).open("rb") as file:
                for size in self.sizes:
                    if len(partial := file.read(size)) < size:
                        raise StorageError(f"{self.file}: a partial has {len(partial)} bytes; expected {size}")
                    yield partial
        except OSError as exc:
            raise StorageError(f"{self.file}: cannot be read: {exc}") from exc

    def remove(self, log_dir: Path) -> None:
        with contextlib.suppress(OSError):
            (log_dir / self.file).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class SpanMerge:
    """The merge of a span's partials by a task.

    Attributes:
        synopsis: None: it has more bytes than are wanted, or no partial is left.
        size: its bytes.
        refused: partials that do not merge with the others, by their numbers, with the reasons.
    """

    span: SliceSpan
    synopsis: bytes | None = field(repr=False)
    size: int
    refused: tuple[tuple[int, str], ...] = ()


def spill(log_dir: Path, span: SliceSpan, partials: Iterable[tuple[int, bytes]], most_bytes: int) -> SpilledSpan:
    """Writes partials, with their ids in the store, to a new file. Raises OSError."""
    file, kept = f"{COMMITS}/answer-{uuid.uuid4().hex}{PARTIAL}", list[tuple[int, int]]()
    (log_dir / COMMITS).mkdir(parents=True, exist_ok=True)
    with (log_dir / file).open("wb") as written:
        for number, partial in partials:
            kept.append((number, written.write(partial)))
    return SpilledSpan(span, file, tuple(n for n, _ in kept), tuple(size for _, size in kept), most_bytes)
