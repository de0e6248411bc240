"""Who may do what: roles, patterns of queries, tokens, JWTs of a local issuer, rates, and the audit log."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import APIRouter

from center.api.access import READS, unguarded
from center.api.app import ROUTERS
from center.api.authentication import FETCH_PAUSE_S, _document
from center.catalog import ComponentHeartbeat
from center.config import CenterConfig
from edgewater.base.errors import InvalidConfig, StorageError, Unauthenticated
from tests.center.api.conftest import T0
from tests.center.api.issuer import Issuer, issuing
from tests.edgewater.runtime.test_secret_files import serving
from tests.refusals import refused

WAIT_S = 60.0
SPEC = {"name": "sales_n", "from": "flights", "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}
PRINCIPALS = {
    "root": {"token": "root-secret", "role": "admin"},
    "watcher": {"token": "watcher-secret"},
    "seller": {"token": "seller-secret", "role": "editor", "queries": ["sales_*"], "streams": ["flights"]},
    "clerk": {"sha256": hashlib.sha256(b"clerk-secret").hexdigest(), "queries": ["sales_*"]},
    "gone": {"token": "gone-secret", "expires": "2013-01-01T00:00:00Z"},
}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-secret"}


@pytest.fixture
def guarded(desk):
    """The API with `PRINCIPALS`, two queries of two owners, and a function that asks as one of them."""
    app = desk.app(principals=PRINCIPALS)
    desk.register_over("jfk", name="sales_n")
    desk.register(name="hr_n")

    def ask(name: str, method: str, path: str, **request):
        return desk.ask(method, path, app=app, headers=bearer(name), **request)

    ask.desk, ask.app = desk, app
    return ask


def test_every_route_states_what_it_requires():
    assert [path for router in ROUTERS for path in unguarded(router)] == []
    router = APIRouter()
    router.get("/stated", dependencies=[READS])(lambda: None)
    router.get("/forgotten")(lambda: None)
    assert list(unguarded(router)) == ["/forgotten"]


ALLOWED = [
    ("watcher", "GET", "/v1/queries/hr_n", 200),
    ("watcher", "GET", "/v1/edges", 200),
    ("watcher", "GET", "/v1/load", 200),
    ("watcher", "GET", "/v1/alarms", 200),
    ("watcher", "GET", "/metrics", 200),
    ("watcher", "DELETE", "/v1/queries/hr_n", 403),
    ("watcher", "DELETE", "/v1/edges/jfk", 403),
    ("clerk", "GET", "/v1/queries/sales_n", 200),
    ("clerk", "GET", "/v1/queries/hr_n", 404),
    ("clerk", "GET", "/v1/queries/hr_n/latest", 404),
    ("clerk", "GET", "/v1/queries/hr_n/live", 404),
    ("clerk", "POST", "/v1/queries/hr_n/evaluate", 404),
    ("clerk", "DELETE", "/v1/queries/hr_n", 404),
    ("clerk", "DELETE", "/v1/queries/sales_n", 403),
    ("clerk", "GET", "/v1/alarms", 403),
    ("clerk", "GET", "/metrics", 403),
    ("seller", "DELETE", "/v1/queries/hr_n", 404),
    ("seller", "DELETE", "/v1/queries/sales_n", 204),
    ("seller", "DELETE", "/v1/edges/jfk", 403),
    ("root", "DELETE", "/v1/queries/hr_n", 204),
    ("root", "DELETE", "/v1/edges/jfk", 204),
    ("gone", "GET", "/v1/queries", 401),
    ("gone", "GET", "/v1/load", 401),
    ("nobody", "GET", "/v1/queries", 401),
]


def test_a_role_may_do_what_it_is_for_on_the_queries_it_is_for(guarded):
    for name, method, path, status in ALLOWED:
        given = guarded(name, method, path)
        assert given.status_code == status, (name, method, path, given.text)
        if status == 404:
            nothing = guarded(name, method, path.replace("hr_n", "nothing"))
            assert given.json()["detail"] == nothing.json()["detail"].replace("nothing", "hr_n")


def test_lists_have_the_queries_that_the_caller_may_read(guarded):
    def names(name, path, key):
        return {q[key] for q in guarded(name, "GET", path).json()["queries"]}

    for asked in (("/v1/queries", "name"), ("/v1/load", "query")):
        assert (names("watcher", *asked), names("clerk", *asked)) == ({"sales_n", "hr_n"}, {"sales_n"})


def test_an_editor_registers_under_its_names_only(guarded):
    assert guarded("seller", "POST", "/v1/queries", json={**SPEC, "name": "sales_m"}).status_code == 201
    refused = guarded("seller", "POST", "/v1/queries", json={**SPEC, "name": "hr_m"})
    assert (refused.status_code, refused.json()["type"]) == (403, "https://edgewater.dev/problems/forbidden")
    assert "role editor for hr_m" in refused.json()["detail"]
    assert guarded("watcher", "POST", "/v1/queries", json=SPEC).status_code == 403


REGISTRATIONS = [
    ({"queries": ["sales_*"]}, {}, 403),  # a grant on some names says nothing about streams: none
    ({"queries": ["sales_*"], "streams": ["fl*"]}, {}, 201),
    ({"queries": ["sales_*"], "streams": ["sales"]}, {}, 403),
    ({"streams": ["sales"]}, {}, 403),
    ({}, {}, 201),
    ({"queries": ["sales_*"], "streams": ["*"], "columns": ["carrier"]}, {"group_by": ["carrier"]}, 201),
    ({"columns": ["carrier"]}, {"group_by": ["distance"]}, 403),
    ({"columns": ["carrier"]}, {"where": "distance > 1"}, 403),
    ({"columns": ["carrier"]}, {"measures": {"s": "sum(abs(distance) + 1)"}}, 403),
    ({"columns": ["carrier"]}, {"measures": {"s": "kmeans(distance, dep_delay)"}}, 403),
    ({"columns": ["carrier"]}, {"where": "event_time_ms > 1 AND carrier = 'UA'"}, 201),
    ({"columns": ["dis*"]}, {"measures": {"s": "sum(distance)"}}, 201),
]


@pytest.mark.parametrize(("grant", "asked", "status"), REGISTRATIONS)
def test_an_editor_registers_over_the_streams_and_columns_of_its_grant_only(desk, grant, asked, status):
    app = desk.app(principals={"seller": {"token": "seller-secret", "role": "editor", **grant}})
    desk.connect("jfk")
    for path in ("/v1/queries?dry_run=true", "/v1/queries"):
        given = desk.ask("POST", path, app=app, headers=bearer("seller"), json=SPEC | asked)
        expected = 200 if status == 201 and "dry_run" in path else status
        assert given.status_code == expected, given.text
    assert len(desk.catalog.queries.all()) == (status == 201)
    if status == 403:
        assert given.json()["type"].endswith("/forbidden")


def test_two_grants_do_not_add_up_to_a_third(desk, issuer):
    """One over stream flights under sales_*, one over other streams under ops_*: neither lets ops_* read flights."""
    grants = {
        "a": {"role": "editor", "queries": ["sales_*"], "streams": ["flights"]},
        "b": {"role": "editor", "queries": ["ops_*"], "streams": ["machines"]},
    }
    app = desk.app(oidc=oidc(issuer, roles=grants))
    headers = {"Authorization": f"Bearer {issuer.token(roles=['a', 'b'])}"}
    statuses = [
        desk.ask("POST", "/v1/queries", app=app, headers=headers, json=SPEC | {"name": name}).status_code
        for name in ("sales_n", "ops_n")
    ]
    assert statuses == [201, 403]


def test_the_state_of_the_center_is_open_and_its_reasons_are_not(guarded):
    bare = guarded.desk.get("/readyz", app=guarded.app).json()
    assert bare["missing"] == ["gateway", "job", "api"]
    assert "has not started" in guarded("watcher", "GET", "/readyz").json()["missing"][0]


def test_a_question_about_two_queries_needs_both(desk):
    app = desk.app(principals=PRINCIPALS)
    measures = {"join": "fast_agms(distance)"}
    for name in ("sales_n", "hr_n"):
        desk.report(desk.register(name=name, measures=measures), "jfk", T0, {"UA": 5})

    def ask(name: str, other: str) -> dict[str, object]:
        second = {"query": other, "measure": "join", "group": {"carrier": "UA"}}
        question = {"latest": 1, "measure": "join", "question": "join_size", "global": True, "with": second}
        body, path = json.dumps(question).encode(), "/v1/queries/sales_n/evaluate"
        return json.loads(desk.ask("POST", path, app=app, headers=bearer(name), content=body).text.splitlines()[0])

    assert "estimate" in ask("watcher", "hr_n") and "estimate" in ask("clerk", "sales_n")
    hidden, nothing = ask("clerk", "hr_n")["error"], ask("clerk", "nothing")["error"]
    assert hidden["detail"] == nothing["detail"].replace("nothing", "hr_n")
    assert (hidden["status"], hidden["detail"]) == (404, "query hr_n is not registered")


def test_why_a_component_is_not_ready_is_not_told_to_a_reader_of_some_queries(guarded):
    desk = guarded.desk
    for component in ("gateway", "job"):
        problem = "the batch failed: query hr_n@1" if component == "job" else ""
        desk.components.record(ComponentHeartbeat(component, "host:1", "", desk.now, desk.now, problem))
    for path in ("/v1/queries/sales_n/status", "/v1/queries/sales_n/latest"):
        assert "hr_n" in guarded("watcher", "GET", path).json()["reason"]
        assert guarded("clerk", "GET", path).json()["reason"] == "job: not ready"


def test_a_tokens_file_is_read_again_and_a_broken_one_changes_nothing(desk, tmp_path: Path):
    path = tmp_path / "principals.yaml"
    path.write_text("ann: {token: first}\n")
    app = desk.app(tokens_file=str(path))
    authenticator = app.state.services.authenticator

    def name(token: str) -> str:
        return asyncio.run(authenticator.identify(f"Bearer {token}")).name

    assert name("first") == "ann"
    path.write_text("ann: {token: second, role: emperor}\n")
    assert not authenticator.refresh() and name("first") == "ann"  # it may still be being written
    assert authenticator.refresh() and "api.tokens_file" in authenticator.problem
    assert "second" not in authenticator.problem
    assert name("first") == "ann"
    path.write_text("bob: {token: third}\n")
    assert not authenticator.refresh()
    assert authenticator.refresh() and authenticator.problem is None
    assert name("third") == "bob"
    with pytest.raises(Unauthenticated):
        name("first")


@pytest.mark.parametrize("text", ["", "# nobody\n", "{}\n"])
def test_an_emptied_tokens_file_revokes_its_tokens(desk, tmp_path: Path, text):
    path = tmp_path / "principals.yaml"
    path.write_text("ann: {token: ann-secret, role: admin}\n")
    app = desk.app(tokens_file=str(path))
    assert desk.get("/v1/queries", app=app, headers=bearer("ann")).status_code == 200
    path.write_text(text)
    assert not app.state.services.authenticator.refresh()  # an editor empties a file before it writes it
    assert desk.get("/v1/queries", app=app, headers=bearer("ann")).status_code == 200
    assert app.state.services.authenticator.refresh() and app.state.services.authenticator.problem is None
    assert desk.get("/v1/queries", app=app, headers=bearer("ann")).status_code == 401
    assert desk.get("/v1/queries", app=app).status_code == 401


@pytest.mark.parametrize(
    "text",
    ["[a-secret]", "ann: a-secret", "ann: {token: a-secret, rule: reader}", "ann: {token: a-secret", "a-secret: {}"],
)
def test_an_error_of_a_tokens_file_shows_no_secret(desk, tmp_path: Path, text):
    path = tmp_path / "principals.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        desk.app(tokens_file=str(path))
    assert "a-secret" not in str(caught.value) or text.startswith("a-secret")


def test_off_loopback_without_credentials_the_api_is_refused():
    open_to_all = CenterConfig.from_mapping({"api": {"listen": "0.0.0.0:7480"}})
    with refused(InvalidConfig, "api.token"):
        open_to_all.api.require_credentials()
    CenterConfig.from_mapping({"api": {"listen": "0.0.0.0:7480", "token": "t"}}).api.require_credentials()
    CenterConfig.from_mapping({}).api.require_credentials()
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.from_mapping({"api": {"principals": {"ann": {"token": ["a-secret"]}}}})
    assert "a-secret" not in str(caught.value)


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


@pytest.mark.parametrize("changes", [{"issuer": "http://login.example.com"}, {"jwks_url": "http://10.0.0.1/keys"}])
def test_keys_do_not_come_over_a_network_without_tls(changes):
    section = {"issuer": "https://login.example.com", "audience": "a", "roles": {"x": "admin"}, **changes}
    with refused(InvalidConfig, "api.oidc"):
        CenterConfig.from_mapping({"api": {"oidc": section}})


def oidc(issuer: Issuer, **changes) -> dict:
    roles = {"analysts": {"role": "reader", "queries": ["sales_*"]}, "operators": "admin"}
    return {"issuer": issuer.url, "audience": "edgewater", "leeway": "0s", "roles": roles, **changes}


def test_a_jwt_of_the_issuer_has_the_roles_of_its_claim(desk, issuer):
    app = desk.app(oidc=oidc(issuer))
    desk.register(name="sales_n")

    def status(path: str, token: str) -> int:
        return desk.get(path, app=app, headers={"Authorization": f"Bearer {token}"}).status_code

    assert status("/v1/queries/sales_n", issuer.token()) == 200
    assert status("/v1/alarms", issuer.token()) == 403
    assert status("/v1/alarms", issuer.token(roles="operators analysts")) == 200
    nested = desk.app(oidc=oidc(issuer, claim="realm_access.roles"))
    headers = {"Authorization": f"Bearer {issuer.token(realm_access={'roles': ['operators']})}"}
    assert desk.get("/v1/alarms", app=nested, headers=headers).status_code == 200


def test_a_jwt_that_is_not_of_the_issuer_or_not_valid_now_is_refused(desk, issuer):
    app = desk.app(oidc=oidc(issuer))
    now = int(time.time())  # noqa: TID251  # jwt reads the clock
    unsigned = jwt.encode({"sub": "ann"}, None, "none", headers={"kid": "k1"})
    bad = {
        "expired": issuer.token(exp=now - 1),
        "early": issuer.token(nbf=now + 100),
        "audience": issuer.token(aud="other"),
        "issuer": issuer.token(iss="http://other"),
        "no end": issuer.token(exp=None),
        "no subject": issuer.token(sub=None),
        "no role": issuer.token(roles=["visitors"]),
        "role of another type": issuer.token(roles={"analysts": 1}),
        "key": issuer.token(key=ec.generate_private_key(ec.SECP256R1())),
        "symmetric": issuer.token(key="x" * 32, algorithm="HS256"),
        "unsigned": unsigned,
        "damaged": issuer.token()[:-4] + "AAAA",
        "garbage": "a.b.c",
        "another kid": issuer.token("k1").replace(".", ".e30.", 1)[:200],
    }
    for name, token in bad.items():
        given = desk.get("/v1/queries", app=app, headers={"Authorization": f"Bearer {token}"})
        assert given.status_code == 401, name
        assert token not in given.text


def test_keys_are_fetched_through_a_proxy_only_if_the_configuration_names_one(desk, issuer, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    direct = desk.app(oidc=oidc(issuer))
    headers = {"Authorization": f"Bearer {issuer.token()}"}
    assert desk.get("/v1/queries", app=direct, headers=headers).status_code == 200
    proxy, issuer.fetches = issuer.url, 0
    monkeypatch.setattr(issuer, "url", "http://127.0.0.1:9")
    indirect = desk.app(oidc=oidc(issuer, proxy=proxy))
    headers = {"Authorization": f"Bearer {issuer.token()}"}
    assert desk.get("/v1/queries", app=indirect, headers=headers).status_code == 200
    assert issuer.fetches == 1


def test_a_subject_is_never_taken_for_the_principal_of_a_static_token(desk, issuer, tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    limits = {"reads": "2/day"}
    app = desk.app(oidc=oidc(issuer), principals={"ann": {"token": "ann-secret"}}, limits=limits, audit=str(path))
    jwt_of_ann = {"Authorization": f"Bearer {issuer.token()}"}
    spent = [desk.get("/v1/queries", app=app, headers=jwt_of_ann).status_code for _ in range(3)]
    assert spent == [200, 200, 429]
    assert desk.get("/v1/queries", app=app, headers=bearer("ann")).status_code == 200
    assert json.loads(path.read_text())["principal"] == "oidc:ann"
    with refused(InvalidConfig, "api.principals.oidc:ann"):
        desk.app(principals={"oidc:ann": {"token": "a"}})
    too_long = {"Authorization": f"Bearer {issuer.token(sub='x' * 256)}"}
    assert "at most 255" in desk.get("/v1/queries", app=app, headers=too_long).json()["detail"]


def test_rotated_keys_are_fetched_once_and_an_issuer_out_of_reach_costs_no_time(desk, issuer, monkeypatch):
    app = desk.app(oidc=oidc(issuer))
    verifier = app.state.services.authenticator._jwts
    issuer.fetches = 0
    verifier.verify(issuer.token())
    verifier.verify(issuer.token())
    assert issuer.fetches == 1
    issuer.add_key("k2")
    for _ in range(5):  # an unknown key is asked for again after a pause only
        with pytest.raises(Unauthenticated):
            verifier.verify(issuer.token("k2"))
    assert issuer.fetches == 1
    later = time.monotonic() + 31
    clock = SimpleNamespace(monotonic=lambda: later)
    monkeypatch.setattr("jwt.jwks_client.time", clock)
    monkeypatch.setattr("center.api.authentication.time", clock)
    assert verifier.verify(issuer.token("k2"))[0].name == "oidc:ann"
    assert issuer.fetches == 2
    issuer.is_down = True
    later += 31
    for _ in range(5):
        with pytest.raises((StorageError, Unauthenticated)):
            verifier.verify(issuer.token("k3", key=issuer.keys["k1"]))
    assert issuer.fetches == 3
    assert verifier.verify(issuer.token("k1"))[0].name == "oidc:ann", "known keys are still used"
    issuer.is_down = False
    later += FETCH_PAUSE_S + 31
    issuer.add_key("k3")
    assert verifier.verify(issuer.token("k3"))[0].name == "oidc:ann"


def test_requests_are_limited_per_principal(desk):
    app = desk.app(principals=PRINCIPALS, limits={"reads": "3/day", "changes": "1/day"})
    statuses = [desk.get("/v1/queries", app=app, headers=bearer("watcher")).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    refused = desk.get("/v1/queries", app=app, headers=bearer("watcher"))
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["type"] == "https://edgewater.dev/problems/too-many-requests"
    assert desk.get("/v1/queries", app=app, headers=bearer("clerk")).status_code == 200
    changed = [
        desk.ask("POST", "/v1/queries", app=app, headers=bearer("root"), json=SPEC).status_code for _ in range(2)
    ]
    assert changed == [201, 429]
    assert "edgewater_api_refused_total{reason=\"reads-rate\"} 2.0" in desk.get(
        "/metrics", app=app, headers=bearer("root")
    ).text  # fmt: skip


def test_one_editor_cannot_use_up_the_catalogs_queries(desk):
    """10,000 are held until a day after their deletion: who registers and deletes in a loop locked all others out."""
    app = desk.app(principals=PRINCIPALS, limits={"registrations": "2/day"})

    def register(name: str, by: str = "seller") -> int:
        return desk.ask("POST", "/v1/queries", app=app, headers=bearer(by), json=SPEC | {"name": name}).status_code

    statuses = []
    for name in ("sales_a", "sales_b", "sales_c"):
        statuses.append(register(name))
        desk.ask("DELETE", f"/v1/queries/{name}", app=app, headers=bearer("seller"))
    assert statuses == [201, 201, 429]
    assert [register("hr_n", "root"), *(register("hr_n", "root") for _ in range(5))] == [201, *[200] * 5]
    assert 'edgewater_api_refused_total{reason="registrations-rate"} 1.0' in desk.get(
        "/metrics", app=app, headers=bearer("root")
    ).text  # fmt: skip


def test_changes_and_refusals_are_in_the_audit_log_without_secrets(desk, tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    app = desk.app(principals=PRINCIPALS, audit=str(path))
    desk.connect("jfk")
    asked = [
        ("seller", "POST", "/v1/queries", SPEC),
        ("seller", "POST", "/v1/queries", {**SPEC, "name": "hr_n"}),
        ("seller", "POST", "/v1/queries", {**SPEC, "window": "?"}),
        ("clerk", "GET", "/v1/queries/hr_n?item=a-parameter", None),
        ("nobody", "GET", "/v1/queries", None),
        ("root", "DELETE", "/v1/edges/jfk", None),
        ("watcher", "GET", "/v1/queries", None),
    ]
    for name, method, url, body in asked:
        headers = {**bearer(name), "X-Request-ID": f"of-{name}"}
        given = desk.ask(method, url, app=app, headers=headers, **({"json": body} if body else {}))
        assert given.headers["x-request-id"] == f"of-{name}"
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(x["principal"], x["action"], x["target"], x["outcome"], x["status"]) for x in lines] == [
        ("seller", "register", "/v1/queries/sales_n", "done", 201),
        ("seller", "register", "/v1/queries/hr_n", "refused", 403),
        ("seller", "register", "/v1/queries", "failed", 422),
        ("clerk", "query", "/v1/queries/hr_n", "refused", 404),
        (None, "queries", "/v1/queries", "refused", 401),
        ("root", "retire", "/v1/edges/jfk", "done", 204),
    ]
    assert lines[0]["remote"] == "127.0.0.1" and lines[0]["request"] == "of-seller"
    assert lines[0]["time"] == "2013-02-11T16:00:00Z"
    assert "secret" not in text and "a-parameter" not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_change_that_fails_in_the_center_is_in_the_audit_log_too(desk, tmp_path: Path, monkeypatch):
    path = tmp_path / "audit.jsonl"
    app = desk.app(audit=str(path))

    def fail(*_: object) -> None:
        raise RuntimeError("no table")

    monkeypatch.setattr(desk.catalog.queries, "delete", fail)
    failed = desk.ask("DELETE", "/v1/queries/n", app=app)
    assert (failed.status_code, failed.headers["x-content-type-options"]) == (500, "nosniff")
    line = json.loads(path.read_text())
    assert (line["action"], line["outcome"], line["status"]) == ("delete", "failed", 500)


def test_where_the_audit_log_is_required_a_change_that_cannot_be_recorded_is_not_made(desk, tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    app = desk.app(principals=PRINCIPALS, audit=str(path), audit_required=True)

    def register(name: str) -> int:
        return desk.ask("POST", "/v1/queries", app=app, headers=bearer("root"), json=SPEC | {"name": name}).status_code

    assert register("first") == 201
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["action"], x["outcome"], x["status"]) for x in lines] == [
        ("register", "begun", None), ("register", "done", 201)
    ]  # fmt: skip
    assert lines[0]["request"] == lines[1]["request"] and lines[0]["principal"] == "root"
    path.unlink()
    path.mkdir()  # no file of this name can be opened
    assert register("second") == 503
    assert desk.ask("DELETE", "/v1/queries/first", app=app, headers=bearer("root")).status_code == 503
    assert [q.ref.name for q in desk.catalog.queries.all()] == ["first"]
    assert desk.get("/v1/queries", app=app, headers=bearer("root")).status_code == 200
    lenient = desk.app(principals=PRINCIPALS)
    assert desk.ask("DELETE", "/v1/queries/first", app=lenient, headers=bearer("root")).status_code == 204


def test_the_audit_log_does_not_follow_a_symbolic_link(desk, tmp_path: Path):
    path, victim = tmp_path / "audit.jsonl", tmp_path / "victim"
    victim.write_text("own\n")
    app = desk.app(principals=PRINCIPALS, audit=str(path))
    path.unlink()
    path.symlink_to(victim)
    assert desk.ask("DELETE", "/v1/queries/nothing", app=app, headers=bearer("root")).status_code == 404
    assert victim.read_text() == "own\n"
    assert "edgewater_api_audit_failures_total 1.0" in desk.get("/metrics", app=app, headers=bearer("root")).text
    with refused(InvalidConfig, "api.audit"):
        desk.app(audit=str(path))


def test_one_principal_does_not_take_the_threads_of_all(desk, two_hours, monkeypatch):
    app = desk.app(principals=PRINCIPALS, limits={"reads_at_once": 2})
    reading, most, lock, hold = 0, 0, threading.Lock(), threading.Event()
    latest = desk.results.latest

    def slow(*args):
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
        hold.wait()
        with lock:
            reading -= 1
        return latest(*args)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def status(name: str) -> int:
                return (await client.get("/v1/queries/flights/latest", headers=bearer(name))).status_code

            monkeypatch.setattr(desk.results, "latest", slow)
            greedy = [asyncio.create_task(status("root")) for _ in range(60)]  # more than there are threads
            try:
                async with asyncio.timeout(WAIT_S):
                    while reading < 2:
                        assert not any(task.done() for task in greedy)
                        await asyncio.sleep(0.01)
                monkeypatch.setattr(desk.results, "latest", latest)
                assert await asyncio.wait_for(status("watcher"), WAIT_S) == 200
            finally:
                hold.set()  # whatever failed, or the threads would wait for ever
            assert await asyncio.gather(*greedy) == [200] * 60
            assert most == 2

    asyncio.run(ask())


def test_a_principal_whose_requests_wait_in_a_long_line_is_told_so(desk, two_hours, monkeypatch):
    monkeypatch.setattr("center.api.limits.MAX_WAITING", 3)
    app = desk.app(principals=PRINCIPALS, limits={"reads_at_once": 1})

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            asked = (client.get("/v1/queries/flights/latest", headers=bearer("root")) for _ in range(9))
            return [given.status_code for given in await asyncio.gather(*asked)]

    statuses = asyncio.run(ask())
    assert set(statuses) == {200, 429} and statuses.count(200) >= 3


def test_a_page_in_a_browser_of_this_machine_cannot_use_an_api_without_credentials(desk):
    app = desk.app()

    def status(path: str = "/v1/queries", method: str = "GET", app=app, **headers: str) -> int:
        return desk.ask(method, path, app=app, headers=headers).status_code

    for host in ("localhost", "LOCALHOST:7480", "127.0.0.1:7480", "127.9.9.9", "[::1]:7480"):
        assert status(host=host) == 200, host
    for host in ("rebound.example.com", "rebound.example.com:7480", "10.0.0.1", "localhost.example.com", "x@y:z"):
        assert status(host=host) == 421, host
    refused = desk.get("/v1/queries", app=app, headers={"Host": "rebound.example.com"})
    assert refused.json()["detail"] == (
        "Host 'rebound.example.com' is not this machine; without credentials expected localhost, a loopback address or"
        " one of api.hosts"
    )
    assert refused.headers["x-content-type-options"] == "nosniff"
    assert 'edgewater_api_refused_total{reason="host"} 6.0' in desk.get("/metrics", app=app).text
    desk.connect("jfk")
    undo = "/v1/edges/jfk/reinstate"  # without a body a browser asks nobody before it sends this
    assert status(undo, "POST", origin="https://page.example.com") == 421
    assert status(undo, "POST", origin="null") == 421
    assert status(undo, "POST", origin="http://localhost:7480") == 204
    assert status(undo, "POST") == 204
    behind_a_proxy = desk.app(hosts=["center.example.com"])
    assert status(app=behind_a_proxy, host="center.example.com") == 200
    with_tokens = desk.app(principals=PRINCIPALS)
    assert status(app=with_tokens, host="center.example.com", **bearer("root")) == 200


def test_refusals_do_not_fill_the_disk(desk, tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    app = desk.app(principals=PRINCIPALS, audit=str(path))

    async def many() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for _ in range(100):
                await client.get("/v1/queries")
            desk.now += 60_000
            await client.get("/v1/queries")

    asyncio.run(many())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 61
    assert lines[-1]["left_out"] == 40


def test_a_document_of_the_issuer_without_an_end_is_read_to_a_limit() -> None:
    def endless(handler: Any) -> None:
        handler.request.recv(65_536)
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                handler.request.send(b" " * 65_536)

    with serving(endless) as url, pytest.raises(jwt.PyJWKClientConnectionError):
        _document(url)
