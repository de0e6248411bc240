"""Who may connect as which edge, over gRPC with live sessions: tokens and their file, rotation, expiry, patterns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from center.catalog import Catalog
from center.config import CenterConfig
from center.edge_access import EdgeAccess
from center.ingest.authentication import Credentials, Presented
from edgewater.base.errors import InvalidConfig, Unauthenticated
from edgewater.base.streams import EdgeId
from edgewater.wire import QueryRef
from edgewater.wire import uplink_pb2 as pb
from tests.center.gateway_world import JFK, Center, RawEdge, center, eventually, frame, spec
from tests.insides import reading
from tests.refusals import refused as refused_input

LIVE_FILE: dict[str, Any] = {"reload_ms": 20}


def replace(file: Path, text: str) -> None:
    """Replaces a file as a whole. A busy machine may leave an emptied file empty for longer than two looks."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


async def connected(c: Center, token: str, edge: str = "jfk", **hello: Any) -> RawEdge:
    raw = await RawEdge(c.port, token).__aenter__()
    await raw.hello(edge, **hello)
    return raw


async def refused(c: Center, token: str, edge: str = "jfk", **hello: Any) -> str:
    while True:
        async with RawEdge(c.port, token) as raw:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw.hello(edge, **hello)
        # gRPC replaces the status if the gateway ends the call while Hello is being written.
        if caught.value.code() is not grpc.StatusCode.INTERNAL:
            return f"{caught.value.code().name}: {caught.value.details()}"


async def test_a_token_is_rotated_without_a_restart_and_the_revoked_one_ends_its_session(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("jfk: old\nlga: another\n")
    async with center(tmp_path, tokens_file=file, **LIVE_FILE) as c:
        with_old, other = await connected(c, "old"), await connected(c, "another", "lga")
        assert "unknown credential" in await refused(c, "new")
        replace(file, "jfk: {tokens: [old, new]}\nlga: another\n")
        await eventually(lambda: reading(c.gateway.metrics.credential_reloads) == 1)
        # The access is the same, so the session goes on; a second one with the new token takes its place.
        await with_old.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=5)))
        await with_old.until("time_echo")
        with_new = await connected(c, "new")
        assert (await with_old.refusal())[1] == "conflict"
        replace(file, "jfk: old\nlga: another\n")
        status, code, message = await with_new.refusal()
        assert (status, code) == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
        assert "unknown credential" in message
        await other.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=5)))
        await other.until("time_echo")
        for each in (with_old, with_new, other):
            await each.__aexit__()


@pytest.mark.parametrize("text", ["", "# nobody\n", "{}\n"])
async def test_an_emptied_tokens_file_revokes_all_tokens_and_lets_no_edge_in(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("jfk: secret\n")
    async with center(tmp_path, tokens_file=file, **LIVE_FILE) as c:
        session = await connected(c, "secret")
        replace(file, text)
        status, code, _ = await session.refusal()
        assert (status, code) == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
        assert reading(c.gateway.metrics.credential_reloads) == 1
        for token in ("secret", "another"):
            assert "unknown credential" in await refused(c, token)
        async with RawEdge(c.port) as anonymous:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anonymous.hello("jfk")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await session.__aexit__()


async def test_a_tokens_file_that_cannot_be_used_changes_nothing_and_is_an_alarm(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("jfk: s3cret\n")
    async with center(tmp_path, tokens_file=file, **LIVE_FILE) as c:
        edge = await connected(c, "s3cret")
        replace(file, "jfk: {tokens: [s3cret], strea")
        await eventually(lambda: reading(c.gateway.metrics.credentials_stale) == 1)
        await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=5)))
        await edge.until("time_echo")
        await eventually(c.catalog.alarms.latest)
        (alarm,) = c.catalog.alarms.latest()
        assert (alarm.kind, alarm.edge) == ("credentials-unusable", "")
        assert str(file) in alarm.message and "s3cret" not in alarm.message
        replace(file, "jfk: s3cret\n")
        await eventually(lambda: reading(c.gateway.metrics.credentials_stale) == 0)
        await eventually(lambda: c.catalog.alarms.latest() == [])
        await edge.__aexit__()


async def test_a_secret_that_kubernetes_swaps_under_its_link_is_read(tmp_path: Path) -> None:
    for version, token in (("..1", "old"), ("..2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tokens.yaml").write_text(f"jfk: {token}\n")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "tokens.yaml").symlink_to("..data/tokens.yaml")
    async with center(tmp_path, tokens_file=tmp_path / "tokens.yaml", **LIVE_FILE) as c:
        edge = await connected(c, "old")
        (tmp_path / "..swap").symlink_to("..2")
        (tmp_path / "..swap").rename(tmp_path / "..data")
        assert (await edge.refusal())[1] == "unauthenticated"
        await (await connected(c, "new")).__aexit__()
        await edge.__aexit__()


async def test_a_token_that_expires_ends_its_session(tmp_path: Path) -> None:
    token = {"token": "short-lived", "expires": "1970-01-01T00:20:00Z"}
    access = {"jfk": EdgeAccess.model_validate({"tokens": [token]})}
    async with center(tmp_path, tokens=access, **LIVE_FILE) as c:
        edge = await connected(c, "short-lived")
        c.clock[0] = 1_200_000
        assert "was accepted until 1970-01-01T00:20:00Z" in (await edge.refusal())[2]
        assert "expired credential" in await refused(c, "short-lived")
        await edge.__aexit__()


async def test_an_edge_serves_and_answers_only_what_its_entry_allows(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    allowed = "{{tokens: [secret], streams: [flights], queries: [{}]}}"
    file.write_text(f"jfk: {allowed.format('mi*')}\n")
    async with center(tmp_path, tokens_file=file, **LIVE_FILE) as c:
        for name in ("miles", "delays"):
            c.catalog.queries.register(spec(name), 1)
        trains = await refused(c, "secret", streams=[pb.Stream(name="trains")])
        assert trains.startswith(
            "FAILED_PRECONDITION: Hello: edge jfk may not serve stream trains; expected only flights"
        )
        edge = await connected(c, "secret")
        queries = (await edge.until("queries")).queries
        assert [q.name for q in queries.queries] == ["miles"]
        await edge.send(frame(0), frame(1, QueryRef("delays", 1)))
        assert (await edge.until("refused")).refused.query == "delays"
        await edge.acked(1)
        assert expected(c.catalog) == {"miles": ["jfk"], "delays": []}
        # Other patterns: the session ends, and the next one has them.
        replace(file, f"jfk: {allowed.format('delays')}\n")
        assert "the access of edge jfk has changed" in (await edge.refusal())[2]
        again = await connected(c, "secret", oldest=2, following=2)
        assert expected(c.catalog) == {"miles": [], "delays": ["jfk"]}
        for each in (edge, again):
            await each.__aexit__()


async def test_what_an_edge_may_no_longer_do_is_not_open_to_it_by_ceasing_to_serve_the_stream(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("jfk: secret\n")
    async with center(tmp_path, tokens_file=file, **LIVE_FILE) as c:
        for name in ("miles", "delays"):
            c.catalog.queries.register(spec(name), 1)
        await (edge := await connected(c, "secret")).send(frame(0))
        await edge.acked(0)
        trains, last, seq = [pb.Stream(name="trains")], edge, 1
        for access in ("queries: [delays]", "streams: [trains]"):
            replace(file, f"jfk: {{tokens: [secret], {access}}}\n")
            assert "the access of edge jfk has changed" in (await last.refusal())[2]
            await last.__aexit__()
            last = await connected(c, "secret", oldest=seq, following=seq + 1, streams=trains)
            await last.send(frame(seq))
            assert (await last.until("refused")).refused.reason == "not-expected"
            await last.acked(seq)
            seq += 1
        await last.__aexit__()
        assert c.entries() == [("jfk", 0)]


def expected(catalog: Catalog) -> dict[str, list[str]]:
    from edgewater.model.edge_records import expected_edges

    return {q.ref.name: [str(e) for e in expected_edges(q.spec, catalog.edges.all())] for q in catalog.queries.all()}


def presented(token: str | None = None, **certificate: str) -> Presented:
    metadata = [("authorization", f"Bearer {token}")] if token is not None else []
    return Presented.of(metadata, {key: [value.encode()] for key, value in certificate.items()})


def credentials(**entries: object) -> Credentials:
    return Credentials({edge: EdgeAccess.model_validate(entry) for edge, entry in entries.items()})


@pytest.mark.parametrize(
    ("call", "edge"),
    [
        (presented(peer_uri="spiffe://example.org/jfk", peer_dns="node-7"), "jfk"),
        (presented(peer_dns="lga"), "lga"),
        (presented(x509_common_name="lga"), "lga"),
        (presented("secret", peer_dns="ewr"), "ewr"),
        (presented("secret"), "ewr"),
    ],
)
def test_a_certificate_or_a_token_identifies_an_edge(call: Presented, edge: str) -> None:
    known = credentials(jfk={"identity": "spiffe://example.org/jfk"}, lga={}, ewr={"tokens": ["secret"]})
    known.require(call, EdgeId(edge), 0)
    for other in {"jfk", "lga", "ewr"} - {edge}:
        with pytest.raises(Unauthenticated):
            known.require(call, EdgeId(other), 0)


@pytest.mark.parametrize(
    ("call", "edge", "said"),
    [
        (presented(peer_dns="node-7", x509_common_name="lga"), "lga", "no credential"),
        (presented("secret", peer_dns="lga"), "ewr", "the certificate to lga; expected one of ewr"),
        (presented("both"), "dca", "the certificate to nothing; expected one of spiffe://dca"),
        (presented(peer_uri="spiffe://dca"), "dca", "no credential"),
        (presented(), "lga", "no credential"),
    ],
)
def test_an_entry_asks_for_all_that_it_names(call: Presented, edge: str, said: str) -> None:
    known = credentials(lga={}, ewr={"tokens": ["secret"]}, dca={"tokens": ["both"], "identity": "spiffe://dca"})
    with pytest.raises(Unauthenticated, match=said):
        known.require(call, EdgeId(edge), 0)


def test_a_client_certificate_without_a_name_is_nobodys() -> None:
    with pytest.raises(Unauthenticated, match="has no name"):
        Credentials({}, by_certificate=True).require(presented(), JFK, 0)


def test_a_token_that_is_empty_or_shared_is_refused() -> None:
    with refused_input(InvalidConfig, "tokens.lga"):
        credentials(jfk={"tokens": ["a"]}, lga={"tokens": ["a"]})
    with pytest.raises(InvalidConfig) as caught:
        CenterConfig.from_mapping({"tokens": {"jfk": {"tokens": [""]}}})
    assert caught.value.field == "tokens.jfk.tokens.0.token"


@pytest.mark.nightly
async def test_two_gateways_over_one_catalog_let_the_same_edges_in_and_lock_them_out_together(
    tmp_path: Path, url: str
) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("jfk: {tokens: [secret], streams: [flights], queries: [mi*]}\nlga: another\n")
    async with (
        center(tmp_path, url=url, tokens_file=file, **LIVE_FILE) as a,
        center(tmp_path, url=url, tokens_file=file, **LIVE_FILE) as b,
    ):
        refs = [a.catalog.queries.register(spec(name), 1)[0].ref for name in ("miles", "delays")]
        at_a = await connected(a, "secret")
        await at_a.send(*(frame(n) for n in range(5)))
        await at_a.acked(4)
        # The link of the first session is broken, and nobody has noticed; the other gateway takes its place.
        at_b = await connected(b, "secret", following=8)
        await at_b.send(*(frame(n) for n in range(8)))
        await at_b.acked(7)
        assert a.entries() == b.entries() == [("jfk", n) for n in range(8)]
        for c, edge in ((a, at_a), (b, at_b)):
            assert "Hello of edge jfk with the credential of edge lga" in await refused(c, "another")
            assert "may not serve stream trains" in await refused(c, "secret", streams=[pb.Stream(name="trains")])
            assert [[q.name for q in m.queries.queries] for m in edge.received if m.HasField("queries")] == [["miles"]]
        await at_b.send(frame(8, refs[1]))
        assert (await at_b.until("refused")).refused.reason == "not-expected"
        again = await connected(a, "secret", following=9)
        await again.send(frame(3, content=b"another body"))
        assert (await again.refusal())[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "outdated-state")
        at_a, honest = await connected(a, "secret", following=9), await connected(b, "another", "lga")
        replace(file, "lga: another\n")
        for edge in (at_a, at_b):
            assert (await edge.refusal())[:2] == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
        await honest.deliver(frame(0))
        assert a.entries() == [*(("jfk", n) for n in range(8)), ("lga", 0)]
        for each in (at_a, at_b, again, honest):
            await each.__aexit__()
