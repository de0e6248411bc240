"""The sink `remote_write` with Debian's Prometheus as the receiver."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from center.sinks import SinkContext, SinkQuery, SinkRunner, SinkStore, read_definition
from center.sinks.testing import QUERY, REF, SCHEMA, answer
from edgewater.base.errors import StorageError
from sim.demo.ports import free_port
from tests.center.api.conftest import HOUR, Desk
from tests.center.sinks.alert_receivers import Receiver
from tests.programs import running


@pytest.fixture
def receiver(tmp_path: Path, prometheus: str) -> Iterator[str]:
    port = free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text("global: {}\n")
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/tsdb",
                 f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver"]  # fmt: skip
    url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + 30
    with running([prometheus, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        while True:
            try:
                if httpx.get(f"{url}/-/ready").is_success:
                    break
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        yield url


@pytest.mark.parametrize("is_indirect", [False, True])
def test_samples_go_through_a_proxy_only_if_the_sink_names_one_and_no_page_confirms_them(
    is_indirect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = ("no_proxy", "*") if is_indirect else ("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with Receiver().serving() as server:
        way = {"url": "http://elsewhere.invalid/write", "proxy": server.url.partition("/hook")[0]}
        document = {"kind": "remote_write", **(way if is_indirect else {"url": server.url})}
        sink = read_definition("series", document).make(SinkContext("series", 1))
        sink.open([SinkQuery(REF, QUERY, SCHEMA)])
        sink.write([answer(1, 0, {"a": 1})], {REF: 1})
        assert len(server.got) == 1
        server.reply = b"<html>log in</html>"
        with pytest.raises(StorageError):
            sink.write([answer(2, HOUR, {"a": 1})], {REF: 2})
        sink.close()


@pytest.mark.e2e
def test_finals_are_series_and_a_page_that_comes_again_changes_nothing(tmp_path: Path, receiver: str) -> None:
    desk = Desk(tmp_path)
    desk.now = int(time.time() * 1000)  # noqa: TID251  # it refuses times far from its clock
    start = desk.now // HOUR * HOUR - 3 * HOUR
    query = desk.register_over("jfk", lateness="0s", measures={"n": "count()", "p": "quantile(dep_delay, 0.9)"})
    document = {
        "kind": "remote_write",
        "url": f"{receiver}/api/v1/write",
        "labels": {"site": "x"},
        "begin": "beginning",
    }
    store = SinkStore(desk.results.engine)

    def runner(owner: str) -> SinkRunner:
        return SinkRunner(
            read_definition("series", document), desk.catalog, desk.results, store, owner=owner, now_ms=lambda: desk.now
        )

    def catch_up(running: SinkRunner) -> None:
        while running.step() == 0:
            pass
        assert not running.problem, running.problem

    for hour in range(3):
        desk.report(query, "jfk", start + hour * HOUR, {"UA": 10 + hour, "AA": 1})
    first = runner("host:1")
    catch_up(first)
    first.stop()
    store.replay("series", 0)
    second = runner("host:2")
    catch_up(second)
    second.stop()

    def series(text: str) -> dict[str, list[float]]:
        end_s = (start + 3 * HOUR) // 1000
        params = {"query": text, "start": str(start // 1000 + 3600), "end": str(end_s), "step": "3600"}
        result: list[Any] = httpx.get(f"{receiver}/api/v1/query_range", params=params).json()["data"]["result"]
        return {r["metric"]["carrier"]: [float(value) for _, value in r["values"]] for r in result}

    assert series('flights_n{site="x"}') == {"UA": [10.0, 11.0, 12.0], "AA": [1.0, 1.0, 1.0]}
    answer = desk.get(f"/v1/queries/flights/windows/{start}").json()
    cell = next(row["p"] for row in answer["data"] if row["group"]["carrier"] == "UA")
    assert series("flights_p_upper")["UA"][0] == cell["upper"]
