"""How much of a daily cap is spent, on disk: a cap that forgot it at each restart would be none."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from edge.durability import journal

log = logging.getLogger(__name__)


class SpentFile:
    """``spent.json`` in the state directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "spent.json"

    def load(self) -> tuple[int, int] | None:
        """(day, bytes) as written last; None: nothing is known, or the file cannot be read."""
        try:
            given = json.loads(self._path.read_text())
            return int(given["day"]), int(given["bytes"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.error("%s cannot be read, so what was sent today counts from now on: %s", self._path, exc)
            return None

    def save(self, day: int, spent_bytes: int) -> None:
        """Replaces what is there. Raises StorageError."""
        journal.write_durably(self._path, json.dumps({"day": day, "bytes": spent_bytes}).encode())
