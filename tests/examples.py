"""How many examples a test of properties draws: fewer in the everyday lanes (`tests/conftest.py`), in proportion."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

FULL = 100
"""Examples of a test without a number of its own in `make test-all`."""


def examples(number: int, **others: Any) -> settings:
    """Returns a decorator for a test that draws `number` examples in `make test-all`."""
    return settings(max_examples=max(round(number * settings().max_examples / FULL), 5), **others)
