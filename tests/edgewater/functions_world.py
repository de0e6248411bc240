"""Record functions that a test installs as if a package had provided them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from edgewater.base.plugins import PluginOrigin
from edgewater.model import record_functions
from edgewater.model.record_functions import RecordFunction, RecordFunctions


def install_functions(monkeypatch: pytest.MonkeyPatch, *functions: RecordFunction) -> None:
    found = RecordFunctions(lambda: [])
    found._register(functions, PluginOrigin("tests 1.0", "these = tests:FUNCTIONS"))
    monkeypatch.setattr(record_functions, "INSTALLED", found)


@dataclass(slots=True)
class Counting:
    """A float64 function of a float64 that records its arguments and passes on the exceptions of `of`."""

    of: Callable[[float], float | None]
    seen: list[float] = field(default_factory=list)

    def __call__(self, column: pa.Array) -> pa.Array:
        given: list[Any] = column.to_pylist()
        self.seen += given
        return pa.array([self.of(value) for value in given], pa.float64())

    def named(self, name: str, *, expensive: bool = True) -> RecordFunction:
        return RecordFunction(name, ("float64",), "float64", self, expensive)
