"""A few worlds in every run of the tests; `make simulate` runs thousands."""

from __future__ import annotations

import warnings

import pytest

from tests.simulation.world import run_seed

SEEDS = 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_statement_is_true() -> None:
    false = []
    for seed in range(SEEDS):
        report = run_seed(seed)
        false += [f"seed {seed}: {falsehood}" for falsehood in report.findings.false]
    assert not false, "\n".join(false)


@pytest.mark.nightly
def test_a_seed_replays() -> None:
    """The same seed gives the same events, faults and answers."""
    lines: list[list[str]] = []
    for _ in range(2):
        trace: list[str] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_seed(7, trace.append)
        lines.append(trace)
    assert lines[0] == lines[1]
    assert len(lines[0]) > 20


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_old_row_of_a_killed_gateway_is_no_falsehood() -> None:
    """The edge of the new gateway is silent, and the catalog's other row names a gateway that was killed."""
    assert run_seed(1281).findings.false == []
