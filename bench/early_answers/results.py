"""The results so far, in a JSON file that is written after each row, so that an interrupted run can be continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sim.early_answers.study import Study

Row = dict[str, Any]


class Results:
    """Rows by part; a row has all fields of its `Study`.

    Args:
        path: the JSON file.
        fresh: discard the results in the file.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        self._parts: dict[str, Any] = {} if fresh or not path.exists() else json.loads(path.read_text())

    def of(self, part: str, studies: Sequence[Study]) -> list[Row]:
        """Returns the rows of the studies that have been measured, in order."""
        known = {_name(row): row for row in self._parts.get(part, [])}
        return [known[name] for name in map(_name, map(asdict, studies)) if name in known]

    def missing(self, part: str, studies: Sequence[Study]) -> list[Study]:
        """Returns the studies without a row."""
        known = {_name(row) for row in self._parts.get(part, [])}
        return [study for study in studies if _name(asdict(study)) not in known]

    def add(self, part: str, row: Row) -> None:
        """Adds a row and replaces the file atomically."""
        self.put(part, [*self._parts.get(part, []), row])

    def put(self, part: str, value: Any) -> None:
        """Sets a part that does not consist of studies, and replaces the file."""
        self._parts[part] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._parts, indent=1))
        unfinished.replace(self._path)


_FIELDS = tuple(asdict(Study()))


def _name(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in _FIELDS)
