"""Cells of a test that are nightly, because they prove the same of other data."""

from __future__ import annotations

from typing import Any

import pytest


def at_night(*values: Any) -> list[Any]:
    """Returns parameters that only `make nightly` and `make test-all` run."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
