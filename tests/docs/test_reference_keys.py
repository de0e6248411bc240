"""The reference pages list every key that a query, an edge's and a center's configuration may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from center.config import CenterConfig
from edge.config import EdgeConfig
from edge.sources.kafka_client import KafkaConfig
from edge.sources.mqtt import MqttConfig
from edge.sources.remote_write import RemoteWriteInput
from edge.sources.syslog import SyslogConfig
from edgewater.model import accuracy, query
from edgewater.model.caching import ESTIMATES, EVICTIONS, SIZINGS
from edgewater.model.query import QuerySpec

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's type contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def keys_of(model: type[BaseModel]) -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        if field.exclude:  # no key of the file
            continue
        found.add(field.alias or name)
        for inner in models_in(field.annotation):
            found |= keys_of(inner)
    return found


@pytest.mark.parametrize(("page", "model"), [("edge.md", EdgeConfig), ("center.md", CenterConfig)])
def test_the_page_of_a_configuration_has_every_key(page: str, model: type[BaseModel]) -> None:
    text = (REFERENCE / page).read_text()
    assert sorted(key for key in keys_of(model) if not re.search(rf"\b{key}\b", text)) == []


@pytest.mark.parametrize(
    ("page", "model"),
    [
        ("read-kafka.md", KafkaConfig),
        ("read-mqtt.md", MqttConfig),
        ("receive-prometheus.md", RemoteWriteInput),
        ("receive-syslog.md", SyslogConfig),
    ],
)
def test_the_page_of_a_kind_of_sources_has_every_key(page: str, model: type[BaseModel]) -> None:
    text = (REFERENCE.parent / "how-to" / page).read_text() + (REFERENCE / "edge.md").read_text()
    assert sorted(key for key in keys_of(model) if not re.search(rf"\b{key}\b", text)) == []


def test_the_page_of_queries_has_a_row_for_every_key_and_policy() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", (REFERENCE / "query.md").read_text(), re.MULTILINE))
    window = {"tumbling", "sliding", "every", "session", "max", "offset"}
    cache = {"eviction", "sizing", "estimate", "eager"}
    assert {*query.KEYS, *accuracy.KEYS, *cache} - rows == set()
    text = (REFERENCE / "query.md").read_text()
    assert [
        word
        for word in (*window, *EVICTIONS, *SIZINGS, *ESTIMATES)
        if f"`{word}" not in text and f"{word}:" not in text
    ] == []


@pytest.mark.parametrize("page", ["reference/query.md", "reference/edge.md", "how-to/answer-early.md"])
def test_a_page_that_states_the_most_groups_of_an_early_answer_agrees_with_the_code(page: str) -> None:
    text = (REFERENCE.parent / page).read_text()
    stated = re.findall(r"(?:at most|more than) (\d+) groups", text, re.IGNORECASE)
    assert set(stated) <= {str(accuracy.MAX_GROUPS)}
    assert stated or page == "reference/edge.md"


def test_the_example_of_the_cache_row_is_the_default() -> None:
    (example,) = re.findall(r"^\| `cache` \| no \| `(\{.*?\})`", (REFERENCE / "query.md").read_text(), re.MULTILINE)
    text = f"{{name: q, from: s, measures: {{n: count()}}, window: {{tumbling: 1h}}, cache: {example}}}"
    assert "cache" not in QuerySpec.from_yaml(text).to_mapping()
