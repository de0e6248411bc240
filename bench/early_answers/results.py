"""What has been measured so far: one JSON file that grows row by row, so that a run cut short can be continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sim.early_answers.study import Study

Row = dict[str, Any]


class Results:
    """Rows by part, of any seed and number of windows; a row holds all fields of the `Study` that it is of.

    Args:
        path: of the JSON file. What is there is read, unless `fresh`.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        self._parts: dict[str, Any] = {} if fresh or not path.exists() else json.loads(path.read_text())

    def of(self, part: str, studies: Sequence[Study]) -> list[Row]:
        """The rows of those studies that have been measured, in their order."""
        known = {_name(row): row for row in self._parts.get(part, [])}
        return [known[name] for name in map(_name, map(asdict, studies)) if name in known]

    def missing(self, part: str, studies: Sequence[Study]) -> list[Study]:
        """The studies that have no row yet."""
        known = {_name(row) for row in self._parts.get(part, [])}
        return [study for study in studies if _name(asdict(study)) not in known]

    def add(self, part: str, row: Row) -> None:
        """Adds a row and writes the file; it is replaced as a whole, so that it can be read at any moment."""
        self.put(part, [*self._parts.get(part, []), row])

    def get(self, part: str, otherwise: Any) -> Any:
        """A part that is not made of studies."""
        return self._parts.get(part, otherwise)

    def put(self, part: str, value: Any) -> None:
        """Sets a part that is not made of studies, and writes the file."""
        self._parts[part] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._parts, indent=1))
        unfinished.replace(self._path)


_FIELDS = tuple(asdict(Study()))


def _name(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in _FIELDS)
