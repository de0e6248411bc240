"""The fuzzer finds what it is for: errors outside the tree, warnings, runs that hang, and memory."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.hostile.__main__ import fuzz
from bench.hostile.targets import Target
from edgewater.base.errors import CorruptSynopsis


def accepts(data: bytes) -> None:
    if len(data) % 2:
        raise CorruptSynopsis("refused")


def hangs(data: bytes) -> None:
    while data != HONEST:
        pass


HONEST = b"x" * 8
FAULTS: dict[str, tuple[Callable[[bytes], object], str | None]] = {
    "accepts": (accepts, None),
    "raises": (lambda data: data == HONEST or data[9999], "IndexError"),
    "hangs": (hangs, "Hung"),
    "warns": (lambda data: np.array([1.0]) / np.array([float(data == HONEST)]), "RuntimeWarning"),
    "takes memory": (lambda data: bytes((data != HONEST) << 24), "MemoryError"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_and_written(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, error = FAULTS[fault]
    target = Target(fault, lambda: [HONEST], run, seconds=0.004 if fault == "hangs" else 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcomes = [fuzz(target, 3, 0, mutants, 1) for mutants in (12, 12)]
    # How many bytes were taken is measured, and differs by what the process does besides.
    first, second = (Counter(re.sub(r"'\d+ bytes", "'N bytes", f) for f in o.failures.elements()) for o in outcomes)
    assert first == second and outcomes[0].accepted == outcomes[1].accepted
    found = {failure.split(" ")[0] for failure in outcomes[0].failures}
    assert found == ({error} if error else set())
    assert bool(list(tmp_path.glob("bench/out/hostile/*.hex"))) == bool(error)
