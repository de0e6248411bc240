"""The code of `docs/how-to/sample-a-function.md` works: its function is loaded as a plugin."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from center.early import estimate_function
from edgewater.model.query import QuerySpec
from edgewater.synopses import plugins
from edgewater.synopses.plugins import Plugins
from tests.insides import forget_registrations

PAGE = (Path(__file__).parents[4] / "docs/how-to/sample-a-function.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
QUERIES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_a_query_with_an_accuracy_can_use_the_function_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_registrations(monkeypatch)
    points = [EntryPoint("trimming", "trimming:TRIMMED_MEAN", plugins.GROUP)]
    monkeypatch.setattr(plugins, "INSTALLED", Plugins(lambda: points))

    spec = QuerySpec.from_mapping({"name": "q", "from": "s", "window": {"tumbling": "1m"}, **QUERIES[1]})
    assert not plugins.INSTALLED.problems
    (bound,) = spec.bind({"delay": pa.float64()}).measures
    function = bound.measure.function.sample
    assert function is not None and spec.accuracy is not None and spec.accuracy.measure == "delay"
    rows = np.random.default_rng(1).gamma(3.0, 2.0, (10_000, 1))
    found = estimate_function(function, dict(bound.measure.parameters), rows[:2_000], 0.2, np.random.default_rng(2))
    truth = function.fit(rows, dict(bound.measure.parameters), None)
    assert found.lower[0] <= truth[0] <= found.upper[0]
    assert 0.005 < found.error < 0.05
    sys.modules.pop("trimming", None)


def test_the_first_query_of_the_page_is_valid() -> None:
    spec = QuerySpec.from_mapping(QUERIES[0])
    assert spec.measures[0].is_expensive
