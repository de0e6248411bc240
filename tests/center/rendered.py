"""Answers as tests read them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.csv

from center.serving import render as rendering
from edgewater.model.table_texts import csv_table


def render(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the JSON of `center.serving.render.render`."""
    answer: dict[str, Any] = json.loads(rendering.render(*args, **kwargs))
    return answer


def to_table(*args: Any, **kwargs: Any) -> pa.Table:
    """Returns the table of `center.serving.render.evaluated`."""
    return rendering.evaluated(*args, **kwargs).table()


def to_csv(*args: Any, **kwargs: Any) -> bytes:
    """Returns the same table as CSV."""
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(csv_table(to_table(*args, **kwargs)), sink)
    text: bytes = sink.getvalue().to_pybytes()
    return text
