"""The code of `docs/how-to/your-own-synopsis.md` works: its files run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Configured, QueryRefused
from edge.core.streams import StreamSpec
from edgewater.model.query import QuerySpec
from edgewater.synopses import plugins
from edgewater.synopses.plugins import Plugins
from edgewater.wire import QueryRef
from tests.insides import forget_registrations

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/your-own-synopsis.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
QUERY = {"name": "q", "from": "s", "measures": {"m": "geometric_mean(x)"}, "window": {"tumbling": "1s"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_the_synopsis_of_the_page_passes_its_tests(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_growth.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b\d{3} passed", done.stdout)


def test_the_function_of_the_page_answers_in_a_query_and_an_edge_refuses_other_types(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    monkeypatch.syspath_prepend(str(folder))
    forget_registrations(monkeypatch)
    with monkeypatch.context() as inside:
        inside.setattr(plugins, "INSTALLED", Plugins(lambda: [EntryPoint("growth", "growth:SYNOPSES", plugins.GROUP)]))
        spec = QuerySpec.from_mapping(QUERY)
        stack = spec.measures[0].function.make((), pa.float64())
        stack.grow(3)
        stack.update(np.array([0, 0, 1]), np.array([2.0, 8.0, -1.0]))
        np.testing.assert_allclose(stack.query().value, [4.0, np.nan, np.nan])
        effect = EdgeCore({"s": StreamSpec({"x": pa.string()})}).handle(Configured(((QueryRef("q", 1), spec),)))[0]
        assert isinstance(effect, QueryRefused) and "geometric_mean does not take this type" in effect.message
    sys.modules.pop("growth", None)
