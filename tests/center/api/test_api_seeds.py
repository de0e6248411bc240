"""A query's seed is drawn when it is registered, is not told to readers, and is equal only where queries ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from center.api import create_app
from center.config import ApiSection
from edgewater.synopses import Distinct, Frequency, Question, hash_values
from edgewater.synopses.items import row_hashes
from edgewater.wire import QueryRef
from tests.center.api.conftest import T0

WIDTH, DEPTH = 1024, 5
SPEC = {
    "name": "q",
    "from": "flights",
    "measures": {"m": f"count_min(distance, width={WIDTH}, depth={DEPTH})"},
    "window": {"tumbling": "1h"},
}
HONEST = np.random.default_rng(1).integers(1 << 40, 1 << 50, 20_000)
CANDIDATES = np.arange(1, 1 << 20)
VICTIM = 0


def post(desk, app=None, path="/v1/queries", **changes: object):
    return desk.ask("POST", path, app=app, json={**SPEC, **changes})


def collisions_of_a_count_min() -> np.ndarray:
    """150 values per row whose counter is the one of `VICTIM`, if the seed is the public default."""

    def cells(values: np.ndarray, row: int) -> np.ndarray:
        return row_hashes(hash_values(values), row) >> np.uint64(64 - WIDTH.bit_length() + 1)

    victim = np.array([VICTIM])
    return np.concatenate([CANDIDATES[cells(CANDIDATES, row) == cells(victim, row)][:150] for row in range(DEPTH)])


def values_of_few_registers() -> np.ndarray:
    """4,000 values that fill a 64th of the registers of a HyperLogLog, if the seed is the public default."""
    return CANDIDATES[hash_values(CANDIDATES) >> np.uint64(58) == 0][:4000]


ATTACKS: dict[str, tuple[str, Callable[[], np.ndarray], Question, float]] = {
    "count_min": (SPEC["measures"]["m"], collisions_of_a_count_min, Frequency(VICTIM), 0.0),  # type: ignore[index]
    "distinct": ("distinct(distance, precision=12)", values_of_few_registers, Distinct(0.9999), 4000.0),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_records_chosen_for_the_public_seed_do_not_distort_a_registered_query(desk, name):
    measure, choose, question, truth = ATTACKS[name]
    chosen = choose()
    honest = HONEST if name == "count_min" else HONEST[:0]

    def stated(seed: int | None) -> tuple[float, float]:
        app = create_app(desk.catalog, desk.results, desk.components, ApiSection(), now_ms=lambda: desk.now,
                         draw_seed=lambda: seed)  # fmt: skip
        name = f"q{seed}".lower()
        assert post(desk, app, name=name, measures={"m": measure}).status_code == 201
        (registered,) = desk.catalog.queries.get(name).spec.measures
        stack = registered.stack(None)
        stack.grow(1)
        values = np.concatenate([honest, chosen])
        stack.update(np.zeros(len(values), np.int64), values)
        answer = stack.query(question)
        return float(answer.lower[0]), float(answer.upper[0])

    lower, upper = stated(None)  # as if none were drawn: the attack works
    assert not lower <= truth <= upper
    for seed in (1, 0x9E3779B97F4A7C15, (1 << 64) - 1):
        lower, upper = stated(seed)
        assert lower <= truth <= upper


def test_each_new_query_draws_a_seed_and_an_equal_one_keeps_it(desk):
    assert post(desk).status_code == 201 and post(desk, name="other").status_code == 201
    first, other = (desk.catalog.queries.get(name).spec.seed for name in ("q", "other"))
    assert first is not None and other is not None and first != other
    again = post(desk)
    assert (again.status_code, again.json()["version"]) == (200, 1)
    assert desk.catalog.queries.get("q").spec.seed == first
    assert desk.ask("DELETE", "/v1/queries/q").status_code == 204
    assert post(desk).status_code == 201
    assert desk.catalog.queries.get("q").spec.seed not in (first, None)


def test_a_query_that_was_registered_without_a_seed_keeps_the_default(desk):
    desk.register(name="q", group_by=[], lateness="0s", **{k: SPEC[k] for k in ("measures", "window")})
    assert post(desk).status_code == 200
    assert desk.catalog.queries.get("q").spec.seed is None


@pytest.mark.parametrize("seed", [0, 12345, (1 << 64) - 1, "0xdeadbeef"])
def test_a_given_seed_is_used(desk, seed):
    assert post(desk, seed=seed).status_code == 201
    assert desk.catalog.queries.get("q").spec.seed == (int(seed, 16) if isinstance(seed, str) else seed)
    assert post(desk, seed=seed).status_code == 200, "the same query"
    assert post(desk).status_code == 200, "a query without a seed asks for any"
    assert post(desk, seed=7).status_code == 409


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5, True, "deadbeef", "0x", "0x" + "1" * 17, [1]])
def test_what_is_no_seed_is_refused_without_its_value(desk, seed):
    refused = post(desk, seed=seed)
    assert (refused.status_code, refused.json()["field"], refused.json()["value"]) == (422, "seed", "…")


def test_no_reader_is_told_the_seed(desk):
    given = 0xA1B2C3D4E5F60718
    texts = [post(desk, seed=given).text, post(desk, seed=given).text]
    texts += [post(desk, seed=given, path="/v1/queries?dry_run=true").text]
    texts += [desk.get(path).text for path in ("/v1/queries", "/v1/queries/q", "/v1/queries/q/budget")]
    assert not any(form in text.lower() for text in texts for form in (f"{given:x}", str(given)))


def join(desk, *seeds: int | None) -> dict[str, object]:
    """The first line of an answer to a join of two queries, which are registered with these seeds."""
    for name, seed in zip(("left", "right"), seeds, strict=True):
        measures = {"m": "fast_agms(distance)"}
        assert post(desk, name=name, measures=measures, **({} if seed is None else {"seed": seed})).status_code == 201
        query = desk.catalog.queries.get(name)
        desk.ledger_knows(query)
        desk.report(query, "jfk", T0, {"UA": 5})
    question = {"latest": 1, "measure": "m", "question": "join_size", "with": {"query": "right", "measure": "m"}}
    given = desk.ask("POST", "/v1/queries/left/evaluate", content=json.dumps(question).encode())
    line: dict[str, object] = json.loads(given.text.splitlines()[0])
    return line


def test_queries_with_the_same_seed_join(desk):
    desk.connect("jfk")
    joined = join(desk, 7, 7)
    assert joined["lower"] <= 25 <= joined["upper"]


@pytest.mark.parametrize("seeds", [(None, None), (7, 8), (7, None)])
def test_queries_with_other_seeds_do_not_join_and_the_error_says_what_to_do(desk, seeds):
    desk.connect("jfk")
    error = join(desk, *seeds)["error"]
    assert (error["status"], error["field"]) == (422, "with")
    assert "same `seed`" in error["detail"]
    for name in ("left", "right"):
        seed = desk.catalog.queries.get(name).spec.seed
        assert f"{seed:x}" not in error["detail"] or seed < 10


def test_a_seed_survives_the_catalog(desk):
    post(desk)
    query = desk.catalog.queries.get("q")
    assert query.ref == QueryRef("q", 1)
    assert type(query.spec).from_mapping(json.loads(json.dumps(query.spec.to_mapping()))) == query.spec
