"""Makes queries for tests. A test names only the parts that it needs; the other parts are usual ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from edgewater.model.query import QuerySpec

PLAIN: Mapping[str, Any] = MappingProxyType(
    {"name": "q", "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": "1s"}}
)
"""The number of records of the stream `s` in each second."""


def query_spec(parts: Mapping[str, Any] = PLAIN, /, *, stream: str = "s", **usual: Any) -> QuerySpec:
    """Returns the plain query, changed to what is `usual` in a test file, and then by the `parts` of one test."""
    return QuerySpec.from_mapping({**PLAIN, "from": stream, **usual, **({} if parts is PLAIN else parts)})
