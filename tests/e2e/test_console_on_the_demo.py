"""The demo and its console together, as a user starts them."""

from __future__ import annotations

import pytest

from bench.console_demo import ALL, KEPT, run

LARGEST = 150_000
"""Bytes of a picture in the documents."""

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.usefixtures("chromium")]


def test_each_page_shows_the_running_demo_at_each_width(tmp_path):
    assert run(tmp_path / "demo", 70.0, tmp_path, ALL) == []
    taken = {path.name: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert len(taken) == len(ALL)
    assert all(taken[f"{name}-{width}-{scheme}.png"] <= LARGEST for name, width, scheme in KEPT)
