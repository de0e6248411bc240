"""Every kind of sink keeps the contract of `center.sinks.testing`, on its real system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from center.sinks.testing import CASES, Subject
from tests.center.sinks.systems import SYSTEMS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:pyiceberg.*", "ignore::UserWarning:pyiceberg.*")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", SYSTEMS)
def test_the_sink_keeps_the_contract(
    kind: str, case: Callable[[Subject], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case(SYSTEMS[kind](request, tmp_path))
