"""`edgewater edge top` against a running agent."""

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
from edgewater.__main__ import Commands
from tests.edge.center_world import NDJSON, START_MS, Center, config, running, until, with_center


def command(*arguments: str) -> Result:
    from importlib.metadata import EntryPoint

    points = [EntryPoint("edge", "edge.cli:edge", "edgewater.commands")]
    return CliRunner().invoke(Commands("edgewater", find=lambda: points), ["edge", *arguments])


@pytest.mark.slow
@with_center()
async def test_top_shows_what_an_agent_reads_and_rejects(
    center: Center, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not used
    found: dict[str, Any] = {}
    settings = config(tmp_path, center, [{"http": {}}])
    url = f"http://{settings.http.listen}"
    agent = open_agent(settings)
    async with running(agent) as task, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        await until(lambda: bool(agent.outbox.configured.is_set()), "queries", task)
        rows = [{"carrier": f"C{i}", "distance": i, "at": START_MS + i} for i in range(9)]
        body = "".join(json.dumps(row) + "\n" for row in rows) + "not json\n"
        reply = await client.post(f"{url}/v1/streams/flights", content=body, headers=NDJSON)
        assert reply.status_code == 200
        file = tmp_path / "edge.yaml"
        source = {"columns": {"carrier": "string"}, "time": {"column": "at"}, "sources": [{"http": {}}]}
        given = {"edge": "jfk", "state_dir": "other", "streams": {"flights": source}}
        file.write_text(yaml.safe_dump(given | {"http": {"listen": settings.http.listen}}))
        for name, arguments in {
            "top": ("top", url, "--json"), "text": ("top", settings.http.listen), "file": ("top", str(file)),
        }.items():  # fmt: skip
            found[name] = await asyncio.to_thread(command, *arguments)
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
    assert "flights/malformed" in found["file"].output


def test_an_agent_that_is_not_there_or_is_none_is_an_error(tmp_path: Path) -> None:
    assert "is not accepted; expected the agent's configuration file" in command("top", "nowhere.yaml").stderr
    assert "cannot reach the agent" in command("top", "http://127.0.0.1:1").stderr
