"""`docs/how-to/your-own-function.md` does what it says: its files are run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner

from edge.core.core import EdgeCore
from edge.core.events import Configured, QueryAccepted, QueryRefused
from edge.core.streams import StreamSpec
from edgewater.base.errors import InvalidQuery
from edgewater.base.streams import LIVE
from edgewater.functions_cli import functions
from edgewater.model import record_functions
from edgewater.model.query import QuerySpec
from edgewater.model.record_functions import RecordFunctions
from edgewater.wire import QueryRef
from tests.refusals import refused

PAGE = (Path(__file__).parents[3] / "docs/how-to/your-own-function.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
(QUERY,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
COLUMNS = {"host": pa.string(), "lat": pa.float64(), "lon": pa.float64(), "score": pa.float64(), "x": pa.float64()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lookalike", raising=False)
    return tmp_path


@pytest.fixture
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("lookalike", "lookalike:FUNCTIONS", record_functions.GROUP)
    monkeypatch.setattr(record_functions, "INSTALLED", RecordFunctions(lambda: [point]))


@pytest.mark.slow
def test_the_tests_of_the_page_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lookalike.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_the_query_of_the_page_is_accepted_and_its_measure_is_expensive(installed: None) -> None:
    spec = QuerySpec.from_mapping(QUERY)
    (measure,) = spec.measures
    assert measure.is_expensive
    edge = EdgeCore({"dns": StreamSpec(COLUMNS, LIVE)})
    assert edge.handle(Configured(((QueryRef("phishing", 1), spec),))) == [QueryAccepted(QueryRef("phishing", 1))]
    records = {"host": ["exampel-bank.com", None], "lat": [47.0, 52.0], "lon": [8.0, 13.0]}
    batch = pa.record_batch({**records, "event_time_ms": [1, 2]})
    bound = spec.bind(COLUMNS)
    assert bound.where is not None and bound.where.array(batch).to_pylist() == [True, False]
    assert bound.measures[0].argument is not None
    assert bound.measures[0].argument.array(batch).to_pylist() == [pytest.approx(0.92, abs=0.05), None]


@pytest.mark.parametrize("text", re.findall(r"`(sum\(CASE.*?)`", PAGE))
def test_the_expressions_of_the_page_bind(installed: None, text: str) -> None:
    text = text.replace("score(x)", "lookalike(host)")
    spec = QuerySpec.from_mapping({**QUERY, "measures": {"m": text}})
    assert spec.bind(COLUMNS).measures[0].argument is not None


def test_the_command_prints_the_listing_of_the_page(installed: None) -> None:
    listed = CliRunner().invoke(functions).output.replace("(unknown distribution)", "lookalike 1.0")
    assert listed in PAGE


def test_without_the_package_center_and_edge_refuse_the_query(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QuerySpec.from_mapping(QUERY)
    monkeypatch.setattr(record_functions, "INSTALLED", RecordFunctions(lambda: []))
    with refused(InvalidQuery, "measures.suspicion"):
        QuerySpec.from_mapping(QUERY)
    (effect,) = EdgeCore({"dns": StreamSpec(COLUMNS, LIVE)}).handle(Configured(((QueryRef("phishing", 1), spec),)))
    assert isinstance(effect, QueryRefused) and "unknown function" in effect.message
