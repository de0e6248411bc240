"""Stores the used part of the daily quota on disk, so that a restart does not reset it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from edge.durability import journal

log = logging.getLogger(__name__)


class QuotaFile:
    """The file ``quota.json`` in the state directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "quota.json"

    def load(self) -> tuple[int, int] | None:
        """Returns the last saved (day, bytes); None if there is no file or it is damaged."""
        try:
            document = json.loads(self._path.read_text())
            return int(document["day"]), int(document["bytes"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.error("%s cannot be read; today's quota starts at 0: %s", self._path, exc)
            return None

    def save(self, day: int, used_bytes: int) -> None:
        """Replaces the file. Raises StorageError."""
        journal.write_durably(self._path, json.dumps({"day": day, "bytes": used_bytes}).encode())
