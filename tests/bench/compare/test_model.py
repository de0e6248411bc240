"""The rows that the simulator predicts, on generated records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.compare.__main__ import main


@pytest.mark.nightly
def test_predicted_rows_have_the_form_of_measured_ones_and_keep_their_budgets(tmp_path: Path) -> None:
    measured = tmp_path / "rows.json"
    arguments = ["model", "--smoke", "--way", "error-1%-2s"]
    first = CliRunner().invoke(main, [*arguments, "--json"])
    assert first.exit_code == 0, first.output
    rows = json.loads(first.output)
    assert [row["way"] for row in rows] == ["error-1%-2s"]
    assert all(row["worst_error"] <= 0.01 and row["bytes"] > 0 and 0 < row["p50_s"] <= row["p95_s"] for row in rows)
    measured.write_text(first.output)
    second = CliRunner().invoke(main, [*arguments, "--measured", str(measured)])
    ratios = [line.split(" | ") for line in second.output.splitlines()[2:]]
    assert [(line[4], line[9].removesuffix(" |")) for line in ratios] == [("1.00", "1.00")]
