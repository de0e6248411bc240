"""The demo and its console together, as a user starts them."""

from __future__ import annotations

import pytest

from bench.console_demo import ALL, KEPT, run

LARGEST = 150_000
"""Bytes of a picture in the documents."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.usefixtures("chromium"),
]


def test_each_page_shows_the_running_demo_at_each_width_and_answers_are_drawn_as_they_come(tmp_path, record_property):
    report = run(tmp_path / "demo", 70.0, tmp_path, ALL)
    record_property("report", report)
    assert report["problems"] == []
    assert report["answers"] >= 30
    assert report["commit_to_drawn_ms_p50"] <= 1000  # bench/console_demo.py measures it on a quiet machine
    taken = {path.name: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert len(taken) == len(ALL)
    assert all(taken[f"{name}-{width}-{scheme}.png"] <= LARGEST for name, width, scheme in KEPT)
