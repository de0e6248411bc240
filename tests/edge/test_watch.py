"""`edgewater edge top` and `edge tap` against a running agent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner, Result

from edge.agent import open_agent
from edge.config import load_config
from edgewater.__main__ import Commands
from tests.edge.center_world import NDJSON, START_MS, Center, config, running, until, with_center


def command(*arguments: str) -> Result:
    from importlib.metadata import EntryPoint

    points = [EntryPoint("edge", "edge.cli:edge", "edgewater.commands")]
    return CliRunner().invoke(Commands("edgewater", find=lambda: points), ["edge", *arguments])


@pytest.mark.slow
@with_center()
async def test_top_and_tap_show_what_an_agent_reads_rejects_and_answers(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not used
    found: dict[str, Any] = {}
    settings = config(tmp_path, center, [{"http": {}}])
    url = f"http://{settings.http.listen}"
    agent = open_agent(settings)
    async with running(agent) as task, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        await until(lambda: bool(agent.outbox.configured.is_set()), "queries", task)
        other = asyncio.create_task(agent.tap.next("flights", 60, "flights:stdin"))
        tapping = asyncio.create_task(asyncio.to_thread(command, "tap", url, "flights", "-n", "3", "--json"))
        await until(lambda: agent.tap.waiting == 2, "a request that waits", task)
        rows = [{"carrier": f"C{i}", "distance": i, "at": START_MS + i} for i in range(9)]
        body = "".join(json.dumps(row) + "\n" for row in rows) + "not json\n"
        reply = await client.post(f"{url}/v1/streams/flights", content=body, headers=NDJSON)
        assert reply.status_code == 200
        found["tap"] = await tapping
        assert not other.done(), "the chunk is not of its source"
        other.cancel()
        for name, arguments in {
            "top": ("top", url, "--json"), "text": ("top", settings.http.listen),
            "none": ("tap", url, "flights", "--wait", "0.05"),
            "other": ("tap", url, "flights", "--wait", "0.05", "--source", "flights:stdin"),
            "stream": ("tap", url, "trips"),
        }.items():  # fmt: skip
            found[name] = await asyncio.to_thread(command, *arguments)
        for query in ("records=0", "wait=soon", "wait=61", "records=nan"):
            assert (await client.get(f"{url}/v1/streams/flights/tap?{query}")).status_code == 422
        evil = {"Host": "evil.example"}
        assert (await client.get(f"{url}/v1/streams/flights/tap", headers=evil)).status_code == 421
    tapped = json.loads(found["tap"].output)
    assert (tapped["source"], tapped["of"]) == ("flights:http", 9)
    assert [r["distance"] for r in tapped["records"]] == [0, 4, 8]
    assert tapped["rejected"][0]["reason"] == "malformed"
    state = json.loads(found["top"].output)
    assert (state["ready"], state["connected"], state["queries"]) == (True, True, 1)
    assert state["records"] == {"flights": 9}
    assert state["rejected"] == {"flights/malformed": 1}
    (source,) = state["sources"]
    assert (source["source"], source["state"], source["records"]) == ("flights:http", "ready", 9)
    assert "exactly-once" in found["text"].output
    assert state["query_bytes"]["miles"] > 0
    assert state["query_cost_seconds"]["miles"] > 0
    assert "µs a record" in found["text"].output
    assert "flights/malformed" in found["text"].output
    assert "no record of flights has been read within 0.05 s" in found["none"].stderr
    assert (found["stream"].exit_code, "no stream 'trips'; streams: flights" in found["stream"].stderr) == (1, True)


@with_center()
async def test_tokens_of_pushes_are_needed_to_look_at_records_and_come_from_the_file(
    center: Center, tmp_path: Path
) -> None:
    settings = config(tmp_path, center, [{"http": {}}])
    given = {
        "edge": "jfk", "center": {"address": f"127.0.0.1:{center.port}"}, "state_dir": str(tmp_path / "state"),
        "http": {"listen": settings.http.listen, "tokens": ["a-secret-of-pushes"]},
        "streams": {"flights": {"columns": {"carrier": "string"}, "time": {"column": "at", "unit": "ms"},
                                "sources": [{"http": {}}]}},
    }  # fmt: skip
    path = tmp_path / "edge.yaml"
    path.write_text(yaml.safe_dump(given))
    path.chmod(0o600)
    async with running(open_agent(load_config(path))):
        url = f"http://{settings.http.listen}"
        refused = await asyncio.to_thread(command, "tap", url, "flights", "--wait", "0.05")
        assert "a bearer token of http.tokens is required" in refused.stderr
        accepted = await asyncio.to_thread(command, "tap", str(path), "flights", "--wait", "0.05")
        assert "no record of flights" in accepted.stderr


def test_an_agent_that_is_not_there_or_is_none_is_an_error(tmp_path: Path) -> None:
    assert "is not accepted; expected the agent's configuration file" in command("top", "nowhere.yaml").stderr
    assert "cannot reach the agent" in command("top", "http://127.0.0.1:1").stderr
    assert "cannot reach the agent" in command("tap", "http://127.0.0.1:1", "flights").stderr
