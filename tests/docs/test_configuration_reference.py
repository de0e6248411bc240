"""The reference of the configuration is what the models say."""

from edgewater.model import accuracy, query
from edgewater.model.caching import CacheSpec
from edgewater.model.query import QuerySpec
from tests.docs.configuration_reference import PAGE, files, render
from tests.docs.query_keys import QUERY_KEYS


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "python -m tests.docs.configuration_reference renews the page"


def test_every_key_has_a_description_and_a_type() -> None:
    keys = [(f"{path}.{key.name}", key) for sections in files().values() for path, _, rows in sections for key in rows]
    assert [path for path, key in keys if not key.text or key.accepts == "any"] == []


def test_the_keys_of_queries_are_those_that_the_code_reads() -> None:
    stated = {path: {name: default == "required" for name, _, default, _ in keys} for path, _, keys in QUERY_KEYS}
    assert stated[""] == query.KEYS
    assert stated["accuracy"] == accuracy.KEYS
    assert set(stated["cache"]) == set(CacheSpec.__dataclass_fields__)


def test_a_query_with_every_default_that_the_page_states_is_the_query_without_them() -> None:
    plain = "{name: q, from: s, measures: {n: count()}, window: {tumbling: 1h}"
    defaults = {
        f"{path}.{name}".removeprefix("."): default.strip("`")
        for path, _, keys in QUERY_KEYS
        for name, _, default, _ in keys
        if default.startswith("`") and path in ("", "cache")
    }
    cache = ", ".join(
        f"{path.removeprefix('cache.')}: {v}" for path, v in defaults.items() if path.startswith("cache.")
    )
    others = ", ".join(f"{path}: {value}" for path, value in defaults.items() if "." not in path)
    explicit = QuerySpec.from_yaml(f"{plain}, cache: {{{cache}}}, {others}}}")
    assert explicit == QuerySpec.from_yaml(plain + "}")
