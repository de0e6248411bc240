"""`edgewater query`, `edges`, `streams` and `top`, as a user types them, against a real server and without one."""

from __future__ import annotations

import io
import json
import re
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from rich.text import Text

from edgewater.__main__ import GROUP, Commands
from edgewater.base.streams import EdgeId
from edgewater.model.link_forecast import LinkRecord
from edgewater.runtime.health import bound_address, listen
from edgewater.wire import QueryRef, Rest, Withheld
from tests.center.api.conftest import HOUR, SPEC, T0

POINTS = [
    EntryPoint(name, value, GROUP)
    for name, value in {
        "query": "edgewater.client.commands:query", "edges": "edgewater.client.commands:edges",
        "streams": "edgewater.client.commands:streams", "top": "edgewater.client.top:top",
        "sql": "edgewater.client.sql_commands:sql", "center": "center.cli:center",
    }.items()
]  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("EDGEWATER_TOKEN", "EDGEWATER_TOKEN_FILE", "EDGEWATER_CA", "EDGEWATER_URL"):
        monkeypatch.delenv(name, raising=False)

    def command(url: str, *arguments: str, **more: Any) -> Result:
        commands = Commands("edgewater", find=lambda: POINTS)
        return CliRunner(env={"EDGEWATER_URL": url}).invoke(commands, list(arguments), **more)

    return command


def said(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.nightly
def test_a_query_is_added_listed_shown_followed_and_removed(desk, run, tmp_path):
    desk.connect("jfk")
    file = tmp_path / "q.yaml"
    file.write_text(json.dumps(SPEC))
    with desk.served() as url:
        added = said(run(url, "query", "add", str(file), "--json"))
        assert (added["name"], added["version"]) == ("flights", 1)
        assert run(url, "query", "add", "-", input=json.dumps(SPEC)).stdout == "flights is registered, version 1\n"
        tried = run(url, "query", "add", str(file), "--dry-run")
        assert (tried.exit_code, "accepts it" in tried.stdout) == (0, True), tried.output
        unfit = json.dumps({**SPEC, "name": "unfit", "measures": {"n": "sum(nothing)"}})
        assert run(url, "query", "add", "-", "--dry-run", input=unfit).exit_code != 0
        other = json.dumps({**SPEC, "lateness": "2h"})
        refused = run(url, "query", "add", "-", input=other)
        assert (refused.exit_code, "flights" in refused.stderr) == (1, True)
        assert "version 2" in run(url, "query", "put", "-", input=other).stdout
        assert [q["name"] for q in said(run(url, "query", "ls", "--json"))["queries"]] == ["flights"]
        assert re.search(r"flights +2 +flights +tumbling 1h +n, miles, delay", run(url, "query", "ls").stdout)
        query = desk.catalog.queries.get("flights")
        assert said(run(url, "query", "show", "flights", "--json"))["latest"] is None
        loads = {QueryRef("flights", version): (4e3, 0.0) for version in (1, 2)}
        link = LinkRecord(EdgeId("jfk"), low_bytes_s=4e3, high_bytes_s=5e3, loads=loads, stated_at_ms=desk.now)
        desk.catalog.links.record([link], desk.now)
        desk.beat("jfk", 1)
        forecast = run(url, "query", "show", "flights").stdout
        assert "all values in time: yes" in forecast
        assert re.search(r"jfk +yes +3.9 KiB +0 B +at most 0% +at least 3.9 KiB/s +\d+ s ago", forecast), forecast
        asked = run(url, "query", "rm", "flights", input="n\n")
        assert (asked.exit_code, "Delete the query flights" in asked.stderr) == (1, True)
        assert said(run(url, "query", "rm", "flights", "--yes", "--json")) == {"deleted": "flights", "version": 2}
        assert run(url, "query", "ls").stdout == "no query is registered\n"
        assert query.ref.version == 2


@pytest.mark.slow
def test_a_long_list_has_its_first_items_in_the_table_and_all_of_them_on_request(desk, run):
    query = desk.register(group_by=[], measures={"top": "top_k(carrier, 5)", "n": "count()"}, lateness="9h")
    desk.connect("jfk")
    desk.report(query, "jfk", T0, {"UA": 7, "AA": 5, "DL": 3, "B6": 2, "": 1})
    with desk.served() as url:
        short = run(url, "query", "show", "flights").stdout
        assert re.search(r"UA: 7, AA: 5, DL: 3, and 2 more \(--all\)  18", short), short
        for command in ("show", "windows"):
            whole = run(url, "query", command, "flights", "--all").stdout
            assert re.search(r'top.top *\nUA: 7 *\nAA: 5 *\nDL: 3 *\nB6: 2 *\n"": 1 *\n', whole), whole


@pytest.mark.slow
def test_a_query_is_changed_by_file_and_in_an_editor(desk, run, tmp_path, monkeypatch):
    desk.now = T0
    editor = tmp_path / "editor"
    monkeypatch.setenv("EDITOR", f"sh {editor}")
    editor.write_text('sed -i "s/lateness: 1h/lateness: 5m/" "$1"\n')
    with desk.served() as url:
        assert run(url, "query", "put", "-", input=json.dumps(SPEC)).stdout == "flights is registered, version 1\n"
        change = json.dumps({**SPEC, "lateness": "5m"})
        tried = run(url, "query", "put", "-", "--dry-run", "--at", "2013-01-01T02:30:00Z", input=change).stdout
        assert tried.startswith("it has the windows that start at 2013-01-01T03:00:00Z or later\n")
        edited = run(url, "query", "edit", "flights", "--at", "2013-01-01T02:30:00Z")
        assert edited.stdout == (
            "flights is registered, version 2\nit has the windows that start at 2013-01-01T03:00:00Z or later\n"
        ), edited.output
        assert run(url, "query", "edit", "flights").stdout == "flights is not changed\n"
        editor.write_text('sed -i "s/lateness: 5m/lateness: soon/" "$1"\n')
        refused = run(url, "query", "edit", "flights")
        kept = re.search(r"your text is saved in (\S+);", refused.stderr)
        assert refused.exit_code == 2
        assert kept is not None
        assert "lateness: soon" in Path(kept[1]).read_text()
        late = run(url, "query", "put", "-", "--if-version", "1", input=json.dumps(SPEC))
        assert (late.exit_code, "version 2 is the newest now, not version 1" in late.stderr) == (1, True)
        past = run(url, "query", "put", "-", "--at", "2012-01-01T00:00:00Z", input=json.dumps(SPEC))
        assert (past.exit_code, "it is past" in past.stderr) == (2, True)
        short = run(url, "query", "add", "-", "--for", "1h", input=json.dumps({**SPEC, "name": "short"})).stdout
        assert "it ends by itself: it has the windows that start before 2013-01-01T01:00:00Z" in short


@pytest.mark.nightly
def test_answers_are_shown_and_followed_without_control_characters(two_hours, run):
    desk, query = two_hours
    desk.report_both(query, T0 + 2 * HOUR, {"\x1b[2Jred": 2})
    with desk.served() as url:
        shown = run(url, "query", "show", "flights", "--measure", "n").stdout
        assert "\x1b" not in shown
        assert "2013-01-01T02:00:00Z complete revision 1, complete 1, confidence 1" in shown
        assert "\N{REPLACEMENT CHARACTER}[2Jred  4" in shown
        merged = run(url, "query", "windows", "flights", "--every", "day", "--json").stdout.splitlines()
        assert [json.loads(line)["quality"]["completeness"]["windows"] for line in merged] == [24]
        assert "2013-01-01T00:00:00Z" in run(url, "query", "windows", "flights", "--end", "2013-01-01T01:00:00Z").stdout
        tailed = said(run(url, "query", "tail", "flights", "-n", "1", "--json"))
        assert [r["n"] for r in tailed["rows"]] == [4]
        text = run(url, "query", "tail", "flights", "-n", "1", "--group", "carrier:UA", "--phase", "complete").stdout
        assert "no groups" in text
        explained = run(url, "query", "explain", "flights", "2013-01-01T00:00:00Z", "--group", "carrier:UA").stdout
        assert "flights 2013-01-01T00:00:00Z carrier:UA n: 5, confidence 1, final" in explained
        assert "the parts do not add up" in explained
        assert said(run(url, "query", "explain", "flights", "--measure", "miles", "--json"))["measure"] == "miles"
        state = said(run(url, "query", "show", "flights", "--json", "--group", "carrier:UA"))
        assert (state["latest"]["rows"], state["status"]["query"]) == ([], "flights")


def test_the_total_of_all_groups_is_shown_with_what_is_in_no_group(desk, run):
    query = desk.register_over("jfk", measures={"n": "count()"}, budget={"error": {"n": 4}})
    desk.report(query, "jfk", T0, {"UA": 3}, withheld=(Withheld("n", 1.0, 0.0, 1, rest=Rest(1)),))
    with desk.served() as url:
        shown = run(url, "query", "show", "flights").stdout
        assert "all groups: n 4, of which 1 (25%) are in no group" in shown
        assert said(run(url, "query", "show", "flights", "--json"))["latest"]["rest"] == {"n": 1}


@pytest.mark.slow
def test_edges_and_streams_are_listed(desk, two_hours, run):
    desk.beat("jfk", T0 + HOUR, late=3)
    with desk.served() as url:
        assert {e["edge"] for e in said(run(url, "edges", "--json"))["edges"]} == {"jfk", "lga"}
        assert re.search(r"jfk +up +2013-\S+Z +flights +2013-01-01T01:00:00Z +7 .* late 3", run(url, "edges").stdout)
        assert said(run(url, "edges", "retire", "lga", "--yes", "--json")) == {"retired": "lga"}
        assert {e["edge"]: e["state"] for e in said(run(url, "edges", "--json"))["edges"]}["lga"] == "retired"
        assert said(run(url, "edges", "reinstate", "lga", "--json")) == {"reinstated": "lga"}
        assert run(url, "edges", "retire", "ewr", "--yes").exit_code == 1
        elsewhere = run(url, "edges", "--url", url, "retire", "lga", "--yes")
        assert (elsewhere.exit_code, "after retire" in elsewhere.stderr) == (2, True)
        assert {e["state"] for e in said(run(url, "edges", "--json"))["edges"]} == {"up"}
        assert "carrier string, distance int64, dep_delay float64" in run(url, "streams", "ls").stdout


def test_top_fills_the_screen_again_and_again_also_while_the_center_is_away_until_it_is_interrupted(
    two_hours, run, monkeypatch
):
    desk, query = two_hours
    screens: list[str] = []
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=200, height=40, highlight=False, markup=False)
    monkeypatch.setattr("edgewater.runtime.terminal.console", lambda: terminal)
    served = ExitStack()

    def between(seconds: float) -> None:
        assert seconds == 2.0
        screens.append(written.getvalue())
        written.truncate(written.seek(0))
        if len(screens) == 1:
            desk.report_both(query, T0 + 2 * HOUR, {"UA": 2})
        elif len(screens) == 2:
            served.close()
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("edgewater.runtime.terminal.time", SimpleNamespace(sleep=between))
    with served:
        result = run(served.enter_context(desk.served()), "top")
    assert (result.exit_code, len(screens)) == (0, 3), result.output
    assert screens[0].startswith("\x1b[?1049h") and written.getvalue().endswith("\x1b[?1049l")
    first, second, third = (Text.from_ansi(screen).plain for screen in screens)
    assert "2013-01-01T01:00:00Z" in first and "2013-01-01T02:00:00Z" in second
    assert "cannot reach the center" in third and "flights" not in third


@pytest.mark.slow
def test_top_shows_queries_edges_and_alarms(desk, two_hours, run):
    desk.register(name="waiting")
    with desk.served() as url:
        state = said(run(url, "top", "--json"))
        assert [(q["query"], q.get("phase")) for q in state["queries"]] == [("flights", "complete"), ("waiting", None)]
        assert state["queries"][0]["widest"]["measure"] == "n"
        text = run(url, "top").stdout
        assert "no alarms" in text
        assert re.search(r"flights +2013-01-01T01:00:00Z +complete +n \w\w: \d +1 ", text)
    principals = {"some": {"token": "right", "role": "reader", "queries": ["fl*"]}}
    with desk.served(principals=principals) as url:
        limited = said(run(url, "top", "--json", env={"EDGEWATER_TOKEN": "right"}))
        assert ([q["query"] for q in limited["queries"]], "role" in limited["alarms_hidden"]) == (["flights"], True)


@pytest.mark.slow
def test_wrong_names_addresses_and_tokens_are_errors_in_a_line(desk, two_hours, run):
    with desk.served(principals={"reader": {"token": "right", "role": "reader"}}) as url:
        token = {"EDGEWATER_TOKEN": "right"}
        for arguments, code, message in (
            (("query", "show", "nope"), 1, "query nope is not registered"),
            (("query", "show", "fligths"), 1, "is not registered, did you mean flights?"),
            (("query", "explain", "flights", "2001-01-01T00:00:00Z"), 1, "has an answer\n"),
            (("query", "show", "flights", "--measure", "q"), 2, "expected one of n, miles, delay"),
            (("query", "show", "flights", "--group", "xx"), 2, "column:value"),
            (("query", "tail", "nope"), 1, "nope is not registered"),
            (("query", "rm", "flights", "--yes"), 1, "does not have the role editor"),
            (("query", "add", "-"), 2, "a query's name"),
        ):
            result = run(url, *arguments, env=token, input="")
            assert (result.exit_code, result.stderr.count("\n")) == (code, 1), result.stderr
            assert message in result.stderr
        assert "credential" in run(url, "query", "ls").stderr or run(url, "query", "ls").exit_code == 1
    gone = run(url, "query", "ls")
    assert (gone.exit_code, "is it running?" in gone.stderr) == (1, True)
    assert run("7480", "edges").exit_code == 2


def test_a_token_is_no_option_of_any_command():
    import click

    def options(command: click.Command) -> set[str]:
        found = {o for p in command.params for o in p.opts}
        for name in getattr(command, "commands", {}):
            found |= options(command.commands[name])  # type: ignore[attr-defined]
        return found

    for point in POINTS:
        assert not any("token" in o for o in options(point.load()))


def test_a_time_out_names_its_option(run):
    listener = listen("127.0.0.1:0", "silent")
    with listener:
        result = run(f"http://{bound_address(listener)}", "query", "ls", "--timeout", "0.1")
    assert result.exit_code != 0 and "--timeout" in result.stderr
