"""On PostgreSQL, tests of the catalog are nightly: tests of the stores (`tests/center/storage`, `results`) are not."""

from __future__ import annotations

import pytest

from tests.center.conftest import databases

new_database = databases(pytest.mark.slow, pytest.mark.nightly)
