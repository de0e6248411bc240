"""The console in a real browser, over the real API and stores: what it draws, and what happens when things go wrong.

One browser for all tests. A test waits for what the page shows, never for a time. The tests' centers have ports, and
so storage, of their own. By default, each page has a test; what is nightly looks at more of a page that has one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx
import pyarrow as pa
import pytest

from center.api.console import ROUTES, SENT
from center.catalog import Change
from center.sinks import SinkRunner, SinkStore, read_definition
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.key_texts import key_text
from edgewater.model.query import QuerySpec
from edgewater.wire import Rest, Withheld
from tests.center.accuracy_world import BEGIN_MS, spec
from tests.center.api.conftest import COLUMNS, SPEC, Desk
from tests.center.api.console_world import HOUR, T0, fill
from tests.center.stored_world import stored

WAIT_MS = 60_000
LIVE = "async () => { window.live = (await import('/ui/api.js')).live; }"
"""Makes the page's stream known to expressions that are waited for: of a promise, Playwright takes the first value."""
LARGEST = 150_000
"""Bytes of the console, compressed."""


def needs_browser(test: Any) -> Any:
    return pytest.mark.e2e(pytest.mark.usefixtures("chromium")(test))


class Tab:
    """A tab of the browser, with what it must not do."""

    def __init__(self, context: Any, url: str) -> None:
        self.url = url
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.policies: set[str | None] = set()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", self._on_console)
        self.page.on("response", self._on_response)

    def _on_console(self, message: Any) -> None:
        if message.type == "error" and "Content Security Policy" in message.text:
            self.errors.append(message.text)

    def _on_response(self, response: Any) -> None:
        if response.request.resource_type == "document" and response.status == 200:
            self.policies.add(response.headers.get("content-security-policy"))

    def open(self, path: str) -> Any:
        self.page.goto(self.url + path)
        return self.page

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def shows(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    def until(self, expression: str, argument: Any = None) -> Any:
        return self.page.wait_for_function(expression, arg=argument, polling=50).json_value()

    def lists(self, selector: str, count: int) -> list[str]:
        """The texts of the elements, once there are so many."""
        self.until("([selector, count]) => document.querySelectorAll(selector).length === count", [selector, count])
        return self.page.locator(selector).all_inner_texts()

    def drawn(self) -> str:
        return self.until("() => document.querySelector('.chart')?.dataset.drawn || false")

    def ids(self) -> list[int]:
        """The answers that came by the live stream: at least one, for which it waits."""
        self.page.evaluate(LIVE)
        return self.until("() => live.ids.length && live.ids")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    desk = Desk(tmp_path_factory.mktemp("console"))
    fill(desk, windows=8)
    yield desk
    for store in (desk.catalog, desk.components, desk.results):
        store.close()


@pytest.fixture(scope="module")
def served(world: Desk) -> Iterator[str]:
    with world.served(progress="200ms") as url:
        yield url


@pytest.fixture(scope="module")
def browser(chromium: str, served: str) -> Iterator[Any]:
    """The context of all tabs. One tab stays open: so their process does, whose start costs more than most tests."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--process-per-site"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        try:
            context = browser.new_context()
            context.new_page().goto(f"{served}/ui/icon.svg")
            yield context
        finally:
            browser.close()


@contextmanager
def tab(browser: Any, url: str) -> Iterator[Tab]:
    """A tab that asks nobody else, breaks no policy and has no error."""
    opened = Tab(browser, url)
    try:
        yield opened
        assert opened.errors == []
        assert {urlsplit(asked).netloc for asked in opened.asked if asked.startswith("http")} == {urlsplit(url).netloc}
        assert all(policy and "default-src 'self'" in policy for policy in opened.policies)
    finally:
        opened.page.close()


def console_files() -> dict[str, bytes]:
    """The files of the console that are sent, by path below `/ui/`."""
    folder = Path("center/api/ui")
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.name.endswith(SENT)}


def test_the_console_is_small_and_its_files_are_those_of_the_lock():
    files = console_files()
    assert sum(len(gzip.compress(body)) for body in files.values()) <= LARGEST
    lock = json.loads((Path("center/api/ui/vendor") / "LOCK").read_text())
    for entry in lock["files"]:
        body = (Path("center/api/ui/vendor") / entry["file"]).read_bytes()
        assert hashlib.sha256(body).hexdigest() == entry["sha256"], entry["file"]
        assert entry["licence"] and (Path("center/api/ui/vendor") / entry["licence_file"]).exists()
    assert {e["file"] for e in lock["files"]} == {n.removeprefix("vendor/") for n in files if n.startswith("vendor/")}


def test_pages_need_no_credentials_and_other_paths_are_not_pages(desk):
    app = desk.app(token="a-token")
    assert desk.get("/", app=app).headers["location"] == "/ui/"
    assert desk.get("/ui", app=app).headers["location"] == "/ui/"
    for route in ROUTES:
        page = desk.get(f"/ui/{route}", app=app)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "'unsafe-eval'" not in page.headers["content-security-policy"]
    given = desk.get("/ui/app.js", app=app)
    assert desk.get("/ui/app.js", app=app, headers={"If-None-Match": given.headers["etag"]}).status_code == 304
    for path in ("/ui/../models.py", "/ui/vendor/LOCK", "/ui/absent.js", "/ui/%2e%2e/app.py"):
        assert desk.get(path, app=app).status_code == 404


def test_the_page_loads_all_modules_at_once_instead_of_one_after_the_other():
    page = console_files()["index.html"].decode()
    modules = {name for name in console_files() if name.endswith(".js") and name not in ("app.js", "vendor/uplot.js")}
    assert set(re.findall(r'rel="modulepreload" href="/ui/([^"]+)"', page)) == modules


def test_no_source_writes_markup_from_values():
    for name, body in console_files().items():
        if name.endswith(".js") and not name.startswith("vendor/"):
            text = body.decode()
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|dangerously", text), name


@needs_browser
def test_the_overview_has_a_row_per_query_and_says_what_one_without_answers_waits_for(browser, served):
    with tab(browser, served) as t:
        t.open("/")
        t.until("() => document.querySelectorAll('tr[data-given]').length === 2")
        row = t.text("tr[data-query=miles_by_carrier]")
        assert "3/3" in row and "complete" in row and "met" in row
        late = t.text("tr[data-query=delay_quantiles]")
        assert "bounds unknown" in late and "2/3" in late and "without lga" in late
        t.until("() => document.querySelectorAll('svg.spark').length === 2")
        t.shows("teb has never connected")


@needs_browser
def test_a_query_is_drawn_with_its_band_and_has_the_same_values_as_a_table(browser, served):
    with tab(browser, served) as t:
        t.open("/ui/queries/miles_by_carrier?group=%7B%22carrier%22%3A%22UA%22%7D")
        t.until("() => Number(document.querySelector('.chart')?.dataset.drawn.split(':')[1]) >= 6")
        band = t.page.evaluate(
            """() => {
                const c = document.querySelector('.chart canvas');
                const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
                let n = 0;
                for (let i = 3; i < pixels.length; i += 4) if (pixels[i] > 20 && pixels[i] < 90) n += 1;
                return n;
            }"""
        )
        assert band > 1000
        params = {"group": "carrier:UA", "measure": "miles"}
        url = f"{served}/v1/queries/miles_by_carrier/windows"
        answers = httpx.get(url, params=params, timeout=WAIT_MS / 1000).json()["answers"]
        uppers = [f"{a['data'][0]['miles']['upper']:,.0f}" for a in answers]
        assert t.lists("details table tbody tr td:nth-child(5)", len(uppers)) == list(reversed(uppers))
        latest = httpx.get(f"{served}/v1/queries/miles_by_carrier/latest", timeout=WAIT_MS / 1000).json()
        miles, flights = t.lists("section[aria-label=Groups] tfoot td", 2)
        assert f"{latest['total']['flights']['estimate']:,} exact" in flights
        assert f"{latest['total']['miles']['estimate']:,} exact" in miles
        assert ("in no group" in miles) == bool(latest["rest"]["miles"])


@needs_browser
def test_explain_shows_causes_and_edges_and_the_keyboard_reaches_it(browser, served):
    with tab(browser, served) as t:
        t.open("/ui/queries/delay_quantiles")
        t.drawn()
        t.page.locator("details table a").first.focus()
        t.page.keyboard.press("Enter")
        t.shows("Error by cause")
        assert "lga" in t.text("table.causes") and "unknown" in t.text("table.causes")
        assert "no" in t.text("section[aria-label=Edges] tr:nth-child(3)")


@needs_browser
def test_edges_have_a_matrix_and_the_budget_its_shares(browser, served):
    with tab(browser, served) as t:
        t.open("/ui/edges?query=delay_quantiles")
        t.until("() => document.querySelectorAll('table.matrix a.cell').length >= 21")
        t.until("() => document.querySelectorAll('a.cell.s-w').length === 1")
        t.page.locator("tr[data-edge=lga]", has_text="bad_time: 12").wait_for()
        t.open("/ui/budget/miles_by_carrier")
        t.shows("All edges together may withhold at most")


@needs_browser
def test_a_new_query_is_checked_at_its_field_and_registered(browser, served, world):
    with tab(browser, served) as t:
        t.open("/ui/new")
        t.until("() => document.querySelector('#verdict')?.dataset.checked === 'accepted'")
        text = t.page.locator("#spec").input_value()
        t.page.locator("#spec").fill(text.replace("60s", "soon"))
        t.until("() => document.querySelector('#verdict').dataset.checked === 'refused'")
        assert "window.tumbling, line 7" in t.text("#verdict") and "soon" in t.text("#verdict")
        assert t.text(".gutter .bad") == "7"
        assert t.page.locator("button.primary").is_disabled()
        t.page.locator("#spec").fill(text.replace("my_query", "from_the_console"))
        t.until("() => document.querySelector('#verdict').dataset.checked === 'accepted'")
        t.page.locator("button.primary").click()
        t.page.wait_for_url("**/ui/queries/from_the_console")
        assert world.catalog.queries.get("from_the_console").spec.stream == "flights"
        world.catalog.queries.delete("from_the_console", world.now)


@needs_browser
def test_a_token_that_is_wrong_or_has_expired_leads_to_the_login(browser, desk):
    fill(desk, windows=2)
    expires = "1970-01-02T00:00:00Z"
    with (
        desk.served(principals={"me": {"token": "right"}, "late": {"token": "old", "expires": expires}}) as url,
        tab(browser, url) as t,
    ):
        t.open("/ui/")
        for wrong in ("wrong", "old"):
            t.page.locator("#token").fill(wrong)
            with t.page.expect_response(lambda response: response.status == 401):  # the text is there since the first
                t.page.locator("form button").click()
            t.shows("does not accept this token")
        t.page.locator("#token").fill("right")
        t.page.locator("form button").click()
        t.page.locator("tr[data-given]").first.wait_for()
        assert all("right" not in asked for asked in t.asked)
        t.page.get_by_role("link", name="Edges").click()
        t.page.locator("tr[data-edge]").first.wait_for()
        t.page.evaluate("() => sessionStorage.setItem('edgewater.token', 'old')")  # as if it had expired
        t.shows("The token is no longer accepted")


@needs_browser
def test_after_a_restart_of_the_center_the_stream_goes_on_without_a_gap(browser, desk):
    desk.connect("jfk")
    query = desk.register(edges=["jfk"])

    def give(hour: int) -> None:
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 2 + hour})

    give(0)
    with desk.served() as url:
        t = Tab(browser, url)
        t.open("/ui/queries/flights")
        t.drawn()
        t.page.locator("[data-live=live]").wait_for()
        first = t.ids()
    give(1)
    t.page.locator("[data-live=reconnecting]").wait_for()
    give(2)
    with desk.served(urlsplit(url).netloc):
        t.page.locator("[data-live=live]").wait_for()
        last = desk.results.last_answer_id()
        t.until("(last) => live.ids.at(-1) === last", last)
        assert t.errors == []
        newer = desk.results.changes_after(first[-1], 99, query.ref).records
        assert t.ids() == [*first, *(r.answer_id for r in newer)]
        t.lists("details table tbody tr", 3)
        t.page.close()


@needs_browser
def test_the_overview_shows_alerts_with_what_supports_them_and_how_sinks_stand(browser, desk, tmp_path):
    desk.connect("jfk")
    query = desk.register(name="busy", lateness="9h")
    desk.report(query, "jfk", T0, {"UA": 5, "<b>": 1})
    rules = [
        {"alert": "many", "query": "busy", "certainly": "n > 3", "summary": "<i>too many</i>"},
        {"alert": "odd", "query": "busy", "certainly": "m > 3", "for": "2h"},
    ]
    store = SinkStore(desk.results.engine)
    definitions = {
        "pager": {"kind": "alerts", "rules": rules, "targets": {"t": {"webhook": {"url": "http://127.0.0.1:9/"}}}},
        "files": {"kind": "parquet", "path": str(tmp_path / "out")},
    }
    for name, document in definitions.items():
        runner = SinkRunner(
            read_definition(name, {**document, "begin": "beginning"}), desk.catalog, desk.results, store,
            owner="host:1", now_ms=lambda: desk.now,
        )  # fmt: skip
        deadline_s = time.monotonic() + WAIT_MS / 1000
        while name == "pager" and "target t" not in runner.problem:  # its attempt ends in a thread
            assert time.monotonic() < deadline_s
            runner.step()
            desk.now += 2_000
        for _ in range(3):
            runner.step()
            desk.now += 2_000
    with desk.served() as url, tab(browser, url) as t:
        t.open("/")
        t.until("() => document.querySelectorAll('li[data-alert=many]').length === 1")
        shown = t.text("li[data-alert=many]")
        assert "firing" in shown and "carrier=UA" in shown and "<i>too many</i>" in shown
        t.until("() => document.querySelectorAll('tr[data-rule]').length === 2")
        assert "certainly: n > 3" in t.text("tr[data-rule=many]") and "firing" in t.text("tr[data-rule=many]")
        assert "failing" in t.text("tr[data-rule=odd]") and "'m'" in t.text("tr[data-rule=odd]")
        t.until("() => document.querySelectorAll('tr[data-sink]').length === 2")
        assert "target t" in t.text("tr[data-sink=pager]") and "failing" in t.text("tr[data-sink=pager]")
        assert "running" in t.text("tr[data-sink=files]") or "waiting" in t.text("tr[data-sink=files]")


@needs_browser
def test_group_names_full_of_markup_are_text_and_200_groups_are_listed_by_width(browser, desk):
    desk.connect("jfk")
    query = desk.register(name="many", edges=["jfk"])
    nasty = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;'
    desk.report(query, "jfk", T0, {nasty: 1, "": 1, **{f"C{i:03}": 1 for i in range(200)}})
    with desk.served() as url, tab(browser, url) as t:
        t.open("/ui/queries/many")
        t.drawn()
        t.page.get_by_role("button", name="Show").click()
        t.lists("section[aria-label=Groups] tbody tr", 202)
        assert t.page.get_by_text(nasty, exact=False).count() >= 1
        assert t.page.locator("main img").count() == 0
        assert t.page.title() == "Query – Edgewater"


@needs_browser
def test_groups_that_look_alike_are_chosen_one_by_one(browser, desk):
    desk.connect("jfk")
    query = desk.register(name="alike", group_by=["carrier", "distance"], measures={"n": "count()"}, edges=["jfk"])
    big = 1 << 53
    keys = [(None, 1), ("null", 1), ("", 1), ("x", big), ("x", big + 1)]
    rows = [key for at, key in enumerate(keys) for _ in range(at + 1)]
    columns = {"carrier": pa.array([c for c, _ in rows]), "distance": pa.array([d for _, d in rows])}
    desk.ship(query, "jfk", T0, columns)
    with desk.served() as url, tab(browser, url) as t:
        t.open("/ui/queries/alike")
        t.drawn()
        t.lists("section[aria-label=Groups] tbody tr", 5)
        texts = [f"carrier={key_text(c)}, distance={d}" for c, d in keys]
        for at, text in enumerate(texts):
            row = t.page.locator("section[aria-label=Groups] tbody tr").filter(
                has=t.page.get_by_role("button", name=text, exact=True)
            )
            row.wait_for()
            assert row.count() == 1 and str(at + 1) in row.inner_text()
            row.get_by_role("button").click()
            t.page.locator("section[aria-label=Chart] h2 small").filter(has_text=text).wait_for()
            t.drawn()
        for carrier, text in ((None, "carrier:null"), ("null", 'carrier:"null"'), ("", 'carrier:""')):
            t.open(f"/ui/queries/alike?{urlencode([('group', text), ('group', 'distance:1')])}")
            chosen = f"carrier={key_text(carrier)}, distance=1"
            t.page.locator("section[aria-label=Chart] h2 small").filter(has_text=chosen).wait_for()


@needs_browser
def test_a_rate_is_drawn_with_its_two_readings_its_total_and_its_explanation(browser, desk):
    desk.connect("jfk")
    query = desk.register(name="rates", measures={"n": "count()", "known": "count(dep_delay)", "rate": "known / n"})
    for hour in range(3):
        delays = pa.array([1.0, None, None, None][: hour + 2], pa.float64())
        carriers = pa.array(["UA"] * len(delays))
        desk.ship(query, "jfk", T0 + hour * HOUR, {"carrier": carriers, "dep_delay": delays})
    with desk.served() as url, tab(browser, url) as t:
        t.open("/ui/queries/rates?measure=rate&group=%7B%22carrier%22%3A%22UA%22%7D")
        t.until("() => Number(document.querySelector('.chart')?.dataset.drawn.split(':')[1]) >= 3")
        rows = t.lists("details table tbody tr", 3)
        assert "25 %" in rows[0] and "50 %" in rows[2]
        cells = [*t.lists("section[aria-label=Groups] tbody td", 3), *t.lists("section[aria-label=Groups] tfoot td", 3)]
        assert ["%" in cell for cell in cells] == [False, False, True] * 2
        t.page.locator("form label", has_text="Unit").locator("select").select_option("plain")
        t.page.locator("details table tbody tr", has_text="0.25").wait_for()
        assert "unit=plain" in t.page.url
        *_, share = t.lists("section[aria-label=Groups] tbody td", 3)
        assert "0.25" in share and "%" not in share, "the unit that is chosen is that of the table, too"
        assert t.page.locator("label", has_text="Value").locator("option").all_inner_texts() == ["rate", "binomial"]
        _, _, total = t.lists("section[aria-label=Groups] tfoot td", 3)
        assert "0.25" in total
        t.page.locator("label", has_text="Value").locator("select").select_option("binomial")
        t.until("() => document.querySelector('section[aria-label=Chart] h2').innerText.includes('binomial')")
        t.page.locator("details table a").first.click()
        t.shows("Error by cause")
        assert "the measures that it reads" in t.text("table.causes") and "n, known" in t.text("table.causes")
        shares = [t.text(each) for each in ("h1", "section[aria-label=Revisions] tbody")]
        assert [(" %" in share, "0." in share) for share in shares] == [(True, False)] * 2


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_versions_are_compared_and_an_edge_is_retired_and_reinstated(browser, desk, width):
    desk.now = T0
    desk.connect("jfk", "lga")
    first = desk.register(lateness="0s")
    changed = QuerySpec.from_mapping({**SPEC, "where": "distance > 5", "lateness": "0s"})
    desk.catalog.queries.register(changed, desk.now, change=Change(T0 + 2 * HOUR))
    first, second = desk.catalog.queries.versions("flights")
    for query, hours in ((first, (0, 1)), (second, (2, 3))):
        desk.ledger_knows(query)
        for hour in hours:
            for edge in ("jfk", "lga"):
                desk.report(query, edge, T0 + hour * HOUR, {"UA": hour + 1})
    with desk.served() as url, tab(browser, url) as t:
        t.page.set_viewport_size({"width": width, "height": 800})
        t.open("/ui/queries/flights?group=carrier:UA")
        rows = t.lists("details table:not([aria-label]) tbody tr", 4)
        assert [f"version {version}" in row for row, version in zip(rows, (2, 2, 1, 1), strict=True)] == [True] * 4
        told = t.page.locator("table[aria-label=Versions] tr[data-version='2']")
        told.get_by_text("distance > 5").wait_for()
        assert "nothing" in told.locator("del").first.inner_text() and "where" in told.inner_text()
        told.get_by_role("button", name="Show only this").click()
        assert len(t.lists("details table:not([aria-label]) tbody tr", 2)) == 2 and "version=2" in t.page.url
        t.page.locator("form label", has_text="Version").locator("select").select_option("1")
        t.page.locator("details table:not([aria-label]) tbody tr", has_text="2013-01-01 00:00").wait_for()
        t.page.locator("form label", has_text="Version").locator("select").select_option("")
        t.lists("details table:not([aria-label]) tbody tr", 4)
        assert t.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        t.open("/ui/edges")
        row = t.page.locator("tr[data-edge=lga]")
        row.get_by_role("button", name="Retire").click()
        row.get_by_role("button", name="Keep it").click()
        assert desk.catalog.edges.retired() == frozenset()
        row.get_by_role("button", name="Retire", exact=True).click()
        row.get_by_role("button", name="Retire the edge").click()
        row.get_by_role("button", name="Reinstate", exact=True).click()
        assert set(desk.catalog.edges.retired()) == {"lga"}
        row.get_by_role("button", name="Reinstate the edge").click()
        row.get_by_role("button", name="Retire", exact=True).wait_for()
        assert t.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@needs_browser
def test_long_names_fit_a_narrow_screen(browser, desk):
    desk.connect("jfk")
    query = desk.register(measures=dict.fromkeys("abcdefgh", "count()"), lateness="9h")
    desk.report(query, "jfk", T0, {"a_carrier_of_the_north": 3, "UA": 1})
    desk.beat("jfk", T0 + HOUR)
    desk.catalog.alarms.add("input-lost", f"edge jfk, source {'/a_long_path' * 9}", EdgeId("jfk"), desk.now)
    heights = "e => e.getBoundingClientRect().height"
    with desk.served() as url, tab(browser, url) as t:
        t.page.set_viewport_size({"width": 390, "height": 800})
        t.open("/ui/queries/flights")
        group = t.page.locator("button.link", has_text="a_carrier_of_the_north")
        assert group.evaluate(heights) < 30, "a name is not broken in its middle"
        nav = t.page.locator("nav a")
        assert {nav.nth(k).evaluate("e => e.getClientRects().length") for k in range(nav.count())} == {1}
        assert t.page.evaluate("document.querySelector('nav').scrollWidth <= innerWidth")
        t.open("/ui/")
        alarm = t.page.locator(".alarm li").first
        assert alarm.evaluate("e => e.scrollWidth <= e.clientWidth")
        assert t.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        t.open("/ui/edges")
        assert "behind the first" in t.text("tr[data-edge=jfk] td:nth-of-type(2)")


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_rules_of_alerts_are_tried_and_saved(browser, desk, width):
    desk.connect("jfk")
    query = desk.register(name="busy", lateness="9h")
    desk.report(query, "jfk", T0, {"UA": 5, "AA": 1})
    rule = {"alert": "many", "query": "busy", "certainly": "n > 9", "labels": {"severity": "no"}}
    target = {"alertmanager": {"url": "http://127.0.0.1:9"}}
    definition = {"kind": "alerts", "rules": [rule], "targets": {"t": target}}
    with desk.served() as url, tab(browser, url) as t:
        httpx.put(f"{url}/v1/sinks/pager", json=definition, timeout=60).raise_for_status()
        t.page.set_viewport_size({"width": width, "height": 800})
        t.open("/ui/alerts/pager")
        t.page.get_by_role("button", name="Try").click()
        assert "certainly: n > 9" in t.text("tr[data-tried=many]")
        assert t.text("tr[data-tried=many] td.n") == "0"
        box = t.page.locator("#rules")
        box.fill(box.input_value().replace("n > 9", "n > 3"))
        t.until("() => !document.querySelector('tr[data-tried]')")
        t.page.get_by_role("button", name="Try").click()
        t.page.locator("tr[data-tried=many] td.n", has_text="1").wait_for()
        assert "carrier=UA" in t.text("tr[data-tried=many]")
        t.page.get_by_role("button", name="Save").click()
        t.page.get_by_text("Saved.").wait_for()
        (kept,) = httpx.get(f"{url}/v1/sinks/pager", timeout=60).json()["definition"]["rules"]
        assert kept == {**rule, "certainly": "n > 3"}
        box.fill(box.input_value().replace("certainly", "surely"))
        t.page.get_by_role("button", name="Save").click()
        t.page.locator("#verdict .problem", has_text="surely").wait_for()
        assert t.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@needs_browser
def test_negative_values_unknown_bounds_and_a_window_without_a_group_are_not_drawn_as_zero(browser, desk):
    desk.connect("jfk", "lga")
    query = desk.register(
        name="odd", measures={"delay": "min(dep_delay)", "n": "count()"}, budget={"staleness": "1s"},
        edges=["jfk", "lga"],
    )  # fmt: skip
    for hour in range(4):
        desk.now = T0 + (hour + 1) * HOUR + 500
        desk.report(query, "jfk", T0 + hour * HOUR, {"UA": 3} if hour != 1 else {"DL": 1}, delay_from=-50)
        if hour < 3:
            desk.report(query, "lga", T0 + hour * HOUR, {"UA": 1} if hour != 1 else {}, delay_from=-50)
        desk.results.tick(desk.ledger, [], desk.now)
    desk.now += 2000
    desk.results.tick(desk.ledger, [], desk.now)
    with desk.served() as url, tab(browser, url) as t:
        t.open("/ui/queries/odd?group=%7B%22carrier%22%3A%22UA%22%7D")
        t.until("() => Number(document.querySelector('.chart')?.dataset.drawn.split(':')[1]) >= 4")
        rows = t.lists("details table tbody tr", 3)
        assert all("-50" in row for row in rows)
        assert "unknown" in rows[0]


@pytest.mark.nightly
@needs_browser
def test_two_tabs_have_a_stream_each_and_an_answer_is_drawn_in_both(browser, desk):
    desk.connect("jfk")
    query = desk.register(name="both", edges=["jfk"])
    desk.report(query, "jfk", T0, {"UA": 1})
    with desk.served() as url, tab(browser, url) as one, tab(browser, url) as two:
        for t in (one, two):
            t.open("/ui/")
            t.page.locator("tr[data-given]").wait_for()
            t.page.locator("[data-live=live]").wait_for()
            assert sum("/v1/live" in asked for asked in t.asked) == 1
        desk.report(query, "jfk", T0 + HOUR, {"UA": 2})
        for t in (one, two):
            t.shows("2013-01-01 01:00")


@needs_browser
def test_the_staleness_that_is_compared_with_the_budget_is_the_one_that_the_contract_is_about(browser, desk):
    desk.connect("jfk", "lga")
    query = desk.register(measures={"n": "count()"}, budget={"staleness": "15s"}, edges=["jfk", "lga"])
    desk.now = T0 + HOUR + 14_900
    desk.report(query, "jfk", T0, {"UA": 1})
    desk.results.tick(desk.ledger, [], desk.now)
    desk.now = T0 + HOUR + 22_000
    desk.report(query, "lga", T0, {"UA": 1})
    with desk.served() as url, tab(browser, url) as t:
        (answer,) = httpx.get(f"{url}/v1/queries/flights/windows", timeout=WAIT_MS / 1000).json()["answers"]
        assert answer["contract"]["met"] is True and answer["revision"] == 2
        assert (answer["quality"]["staleness_ms"], answer["quality"]["first_staleness_ms"]) == (22_000, 14_900)
        t.open("/ui/")
        t.page.locator("tr[data-given]").wait_for()
        row = t.text("tr[data-given]")
        assert "15 s of 15 s" in row and "this revision 22 s" in row and "met" in row
        assert t.page.locator("tr[data-given] td.n .late").count() == 0


@pytest.mark.nightly
@needs_browser
def test_while_the_center_is_down_no_badge_says_that_all_is_well(browser, desk):
    fill(desk, windows=4)
    badges = """() => [...document.querySelectorAll('.badge')].map((b) => {
        const probe = document.body.appendChild(document.createElement('i'));
        probe.className = 'muted';
        const muted = getComputedStyle(probe).color;
        probe.remove();
        return getComputedStyle(b).color === muted;
    })"""
    with desk.served() as url:
        t = Tab(browser, url)
        t.open("/ui/")
        t.lists("tr[data-given]", 2)
        t.shows("job ready")
        assert not all(t.page.evaluate(badges))
    t.page.locator("tr[data-given] [data-lost]").first.wait_for()
    assert "not reachable since 20" in t.text("[role=status]")
    for row in t.page.locator("tr[data-given]").all_inner_texts():
        assert "not reachable since 20" in row and "met" not in row
    assert "ready" not in t.text(".parts") and all(t.page.evaluate(badges))
    t.page.locator("[role=alert]").first.wait_for()  # the list of queries was asked for again
    assert "12 records have no time" in t.text("section[aria-label=Alarms]")
    with desk.served(urlsplit(url).netloc):
        t.shows("job ready")
        t.page.locator("tr[data-query=miles_by_carrier] .badge.ok", has_text="met").wait_for()
        t.until("() => !document.querySelector('[data-lost]')")
    assert t.errors == []
    t.page.close()


@needs_browser
def test_a_page_without_a_stream_says_that_the_center_is_down(browser, desk):
    fill(desk, windows=2)
    with desk.served() as url:
        t = Tab(browser, url)
        t.open("/ui/edges")
        t.page.locator("tr[data-edge=jfk] .badge.ok").wait_for()
    t.page.locator("tr[data-edge=jfk] [data-lost]").wait_for()
    assert "not reachable since" in t.text("tr[data-edge=jfk]")
    t.page.close()


@pytest.mark.nightly
@needs_browser
def test_groups_are_searched_and_sorted_by_value_and_by_name(browser, desk):
    desk.connect("jfk")
    query = desk.register(name="many", edges=["jfk"])
    desk.report(query, "jfk", T0, {f"C{i:02}": (i * 7) % 41 + 1 for i in range(40)})
    names = "section[aria-label=Groups] tbody th"
    with desk.served() as url, tab(browser, url) as t:
        t.open("/ui/queries/many")
        by_value = sorted((-((i * 7) % 41), f"carrier=C{i:02}") for i in range(40))
        # All intervals are equally wide, so the largest come first.
        assert t.lists(names, 25) == [name for _, name in by_value[:25]]
        t.page.get_by_role("button", name="n", exact=True).click()
        t.page.locator("th[aria-sort=descending]").wait_for()
        assert t.lists(names, 25) == [name for _, name in by_value[:25]]
        t.page.get_by_role("button", name="n", exact=True).click()
        t.page.locator("th[aria-sort=ascending]").wait_for()
        assert t.lists(names, 25) == [name for _, name in reversed(by_value[-25:])]
        t.page.get_by_role("searchbox", name="Search groups").fill("c1")
        t.page.get_by_role("button", name="Group", exact=True).click()
        assert t.lists(names, 10) == [f"carrier=C1{i}" for i in range(10)]
        t.page.get_by_role("searchbox", name="Search groups").fill("none such")
        t.shows("No group matches")


@pytest.mark.nightly
@needs_browser
def test_a_range_of_time_is_chosen_and_the_chart_is_zoomed(browser, served):
    rows = "details table tbody tr"
    with tab(browser, served) as t:
        t.open("/ui/queries/miles_by_carrier?group=%7B%22carrier%22%3A%22UA%22%7D")
        t.lists(rows, 6)
        t.page.get_by_label("From, UTC").fill("2013-01-01T02:00:00")
        t.page.get_by_label("To, UTC").fill("2013-01-01T05:00:00")
        texts = t.lists(rows, 3)
        assert [text[:16] for text in texts] == [f"2013-01-01 0{hour}:00" for hour in (4, 3, 2)]
        assert "start=2013-01-01T02" in t.page.url and "end=2013-01-01T05" in t.page.url
        t.page.reload()
        t.lists(rows, 3)
        for name in ("From, UTC", "To, UTC"):
            t.page.get_by_label(name).fill("")
        t.lists(rows, 6)
        assert "start=" not in t.page.url
        t.drawn()
        chart = t.page.locator(".chart .u-over")
        box = chart.bounding_box()
        t.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
        t.page.mouse.down()
        t.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
        t.page.mouse.up()
        zoom = t.page.get_by_role("group", name="Zoom")
        zoom.get_by_text("2013-01-01 0").wait_for()
        assert "/ui/queries/miles_by_carrier" in t.page.url and t.lists(rows, 6)
        first = zoom.inner_text()
        zoom.get_by_role("button", name="Later").click()
        t.until("(first) => document.querySelector('.zoom').innerText !== first", first)
        zoom.get_by_role("button", name="All").click()
        zoom.get_by_text("or drag over the chart").wait_for()
        zoom.get_by_role("button", name="Zoom in").click()
        zoom.get_by_text("2013-01-01 0").wait_for()
        zoom.get_by_role("button", name="Zoom out").click()
        zoom.get_by_text("or drag over the chart").wait_for()


@pytest.mark.nightly
@needs_browser
def test_the_detail_of_a_window_draws_how_its_interval_closed(browser, desk, tmp_path):
    world = stored(tmp_path / "early", spec({"total": "sum(x)"}, lateness="2s"), seconds=11)
    world.run(11)
    desk.results.close()
    desk.results, desk.now = world.store, world.now_ms
    desk.catalog.queries.register(world.query, BEGIN_MS - 1)
    start = rfc3339(BEGIN_MS + 3_000)
    with desk.served() as url, tab(browser, url) as t:
        told = httpx.get(f"{url}/v1/queries/q/windows/{start}/explain", timeout=WAIT_MS / 1000).json()
        revisions = told["revisions"]
        phases = [r["phase"] for r in revisions]
        assert phases[0] == "early" and phases[-2:] == ["complete", "final"]
        t.open(f"/ui/queries/q/{start}")
        t.lists("figure.closing g[data-revision]", len(revisions))
        caption = t.text("figure.closing figcaption")
        assert f"{revisions[0]['lower']:,.0f}"[:4] in caption and "(early), contains the newest value" in caption
        shapes = [t.page.locator(f"figure.closing g.phase-{p}").first.bounding_box()["x"] for p in ("early", "final")]
        assert shapes == sorted(shapes) and shapes[0] < shapes[1]
        whiskers = t.page.locator("figure.closing .whisker").all()
        ends = [[float(w.get_attribute(name)) for name in ("y1", "y2")] for w in whiskers]
        assert ends[0][1] - ends[0][0] > 20 and ends[-1][0] == ends[-1][1], "the interval shrinks to the final value"
        assert ends[0][0] < float(t.page.locator("figure.closing .newest").get_attribute("y1")) < ends[0][1]


@needs_browser
def test_a_query_is_written_in_sql_with_completion_and_errors_at_their_line(browser, served, world):
    with tab(browser, served) as t:
        t.open("/ui/new")
        t.until("() => document.querySelector('#verdict')?.dataset.checked === 'accepted'")
        t.page.get_by_label("SQL").check()
        t.until("() => document.querySelector('#verdict').dataset.checked === 'accepted'")
        assert t.page.locator("#spec").input_value().startswith("CREATE MATERIALIZED VIEW my_query")
        t.page.locator("#spec").fill(
            "CREATE MATERIALIZED VIEW by_sql AS\nSELECT carrier,\n  summ(distance) AS miles\nFROM fl"
        )
        t.page.locator("#spec").press("End")
        t.page.locator("#spec").press("Control+Space")
        assert t.lists("#offers li", 1) == ["flights stream"]
        t.page.locator("#spec").press("ArrowDown")
        assert t.page.locator("#spec").get_attribute("aria-activedescendant") == "offer-0"
        t.page.locator("#spec").press("Enter")
        t.page.locator("#spec").press_sequentially("\nGROUP BY TUMBLE(INTERVAL '1 minute'), carr")
        assert t.lists("#offers li", 1) == ["carrier string"]
        t.page.locator("#offers li").click()
        t.page.locator("#verdict", has_text="measures.miles, line 3").wait_for()
        assert t.text(".gutter .bad") == "3" and "did you mean sum?" in t.text("#verdict")
        text = t.page.locator("#spec").input_value()
        assert text.endswith("FROM flights\nGROUP BY TUMBLE(INTERVAL '1 minute'), carrier")
        t.page.locator("#spec").fill(text.replace("summ", "sum"))
        t.until("() => document.querySelector('#verdict').dataset.checked === 'accepted'")
        t.page.locator("button.primary").click()
        t.page.wait_for_url("**/ui/queries/by_sql")
        assert [m.name for m in world.catalog.queries.get("by_sql").spec.measures] == ["miles"]
        world.catalog.queries.delete("by_sql", world.now)


@needs_browser
def test_a_query_is_changed_at_a_border_unless_somebody_else_has_changed_it_and_deleted_once_confirmed(browser, desk):
    desk.now = T0
    desk.connect("jfk")
    desk.register(lateness="5m")
    desk.beat("jfk", T0 + HOUR)
    changed = desk.catalog.queries.get("flights").spec
    with desk.served() as url, tab(browser, url) as t:
        t.open("/ui/queries/flights")
        t.page.get_by_role("link", name="Edit").click()
        t.until("() => document.querySelector('#verdict')?.dataset.checked === 'accepted'")
        text = t.page.locator("#spec").input_value()
        assert "lateness: 5m" in text
        t.page.locator("#spec").fill(text.replace("lateness: 5m", "lateness: 7m"))
        t.page.get_by_label("Border, UTC").fill("2000-01-01T00:00:00")
        t.page.locator("#verdict", has_text=re.compile("^at")).and_(t.page.locator("[data-checked=refused]")).wait_for()
        t.page.get_by_label("Border, UTC").fill("2013-01-01T05:00:00")
        t.until("() => document.querySelector('#verdict').dataset.checked === 'accepted'")
        t.page.get_by_role("button", name="Change").click()
        t.page.locator("[data-version='2']", has_text="2013-01-01 05:00").wait_for()
        assert desk.catalog.queries.get("flights").spec.lateness_ms == 7 * 60_000
        t.open("/ui/edit/flights")
        t.until("() => document.querySelector('#verdict')?.dataset.checked === 'accepted'")
        t.page.get_by_label("SQL").check()
        t.until("() => document.querySelector('#verdict').dataset.checked === 'accepted'")
        assert "lateness = '7m'" in t.page.locator("#spec").input_value()
        desk.catalog.queries.register(changed, desk.now, change=Change(T0 + 9 * HOUR))
        t.page.get_by_role("button", name="Change").click()
        t.page.locator("#verdict", has_text="version").and_(t.page.locator("[data-checked=refused]")).wait_for()
        assert desk.catalog.queries.get("flights").ref.version == 3
        t.open("/ui/edit/flights")
        t.until("() => document.querySelector('#verdict')?.dataset.checked === 'accepted'")
        t.page.get_by_label("SQL").check()
        t.page.get_by_label("Border, UTC").fill("2013-01-01T12:00:00")
        t.until("() => document.querySelector('#verdict').dataset.checked === 'accepted'")
        t.page.locator("#spec").fill(t.page.locator("#spec").input_value().replace("'5m'", "'8m'"))
        t.until("() => document.querySelector('#verdict').dataset.checked === 'accepted'")
        t.page.get_by_role("button", name="Change").click()
        t.page.locator("[data-version='4']", has_text="2013-01-01 12:00").wait_for()
        assert desk.catalog.queries.get("flights").spec.lateness_ms == 8 * 60_000
        t.open("/ui/queries/flights")
        t.page.get_by_role("button", name="Delete").click()
        t.page.get_by_role("button", name="Keep it").click()
        assert desk.catalog.queries.get("flights").ref.version == 4
        t.page.get_by_role("button", name="Delete", exact=True).click()
        t.page.get_by_role("button", name="Delete the query and its answers").click()
        t.page.wait_for_url("**/ui/")
        assert desk.catalog.queries.newest() == []


@needs_browser
def test_windows_are_rolled_up_in_a_zone_and_an_interval_leads_to_its_windows(browser, served):
    rows = "details table tbody tr"
    with tab(browser, served) as t:
        t.open("/ui/queries/miles_by_carrier?group=%7B%22carrier%22%3A%22UA%22%7D")
        t.lists(rows, 6)
        t.page.get_by_label("Roll up").select_option("day")
        t.page.locator(rows, has_text="2013-01-01 00:00").get_by_text("windows").wait_for()
        assert len(t.lists(rows, 1)) == 1
        t.page.get_by_label("Zone").fill("America/New_York")
        t.page.get_by_label("Zone").press("Enter")
        assert [row[:16] for row in t.lists(rows, 2)] == ["2013-01-01 05:00", "2012-12-31 05:00"]
        params = {"every": "day", "zone": "America/New_York", "group": "carrier:UA", "measure": "miles"}
        asked = httpx.get(f"{served}/v1/queries/miles_by_carrier/rollup", params=params, timeout=WAIT_MS / 1000)
        values = [f"{a['data'][0]['miles']['estimate']:,.0f}" for a in asked.json()["answers"]]
        assert t.page.locator(f"{rows} td:nth-child(3)").all_inner_texts() == values[::-1]
        assert "every=day" in t.page.url and "zone=America" in t.page.url
        t.page.get_by_label("Zone").fill("America/Nowhere")
        t.page.get_by_label("Zone").press("Enter")
        t.page.locator("[role=alert]", has_text="America/Nowhere").wait_for()
        t.page.get_by_label("Zone").fill("America/New_York")
        t.page.get_by_label("Zone").press("Enter")
        t.lists(rows, 2)
        t.page.locator("details table a", has_text="windows").last.click()
        assert t.lists(rows, 5)[-1].startswith("2013-01-01 00:00")
        assert "every=" not in t.page.url


@pytest.mark.nightly
@needs_browser
def test_a_link_has_what_is_shown_and_a_dashboard_has_several_queries(browser, served):
    names = "section[aria-label=Groups] tbody th"
    with tab(browser, served) as t:
        t.open("/ui/queries/miles_by_carrier?measure=flights&start=2013-01-01T02%3A00%3A00Z")
        t.drawn()
        t.page.get_by_role("searchbox", name="Search groups").fill("a")
        t.page.get_by_role("button", name="Group", exact=True).click()
        t.until("() => /find=a.*sort=group/.test(location.search)")
        found = t.lists(names, 8)
        t.page.get_by_role("button", name="Zoom in").click()
        t.until("() => /[?&]zoom=/.test(location.search)")
        t.page.locator("[aria-label=Zoom] small", has_text="…").wait_for()
        zoom = t.text("[aria-label=Zoom] small")
        t.page.get_by_role("button", name="Copy link").click()
        said = t.page.locator(".title [role=status]")
        said.filter(has_text=re.compile(".")).wait_for()
        link = t.page.url if said.inner_text() == "copied" else said.inner_text()
        t.page.goto(link)
        assert t.lists(names, 8) == found and t.text("[aria-label=Zoom] small") == zoom
        assert t.page.get_by_label("Measure").input_value() == "flights"
        t.page.get_by_role("link", name="Add to dashboard").click()
        t.page.locator("[data-panel=miles_by_carrier] .chart canvas").wait_for()
        assert "flights, carrier=" in t.text("[data-panel=miles_by_carrier] h2")
        t.page.get_by_label("Query").select_option("delay_quantiles")
        t.page.get_by_role("button", name="Add").click()
        both = "() => [...document.querySelectorAll('%s')].filter((p) => %s).length === 2"
        t.until(both % ("[data-panel]", "Number(p.dataset.points) >= 2"))
        saved = t.page.url
        t.page.goto("about:blank")
        t.page.goto(saved)
        t.until(both % ("[data-panel] .chart", "p.dataset.drawn"))
        t.page.get_by_role("button", name="Remove delay_quantiles").click()
        t.until("() => document.querySelectorAll('[data-panel]').length === 1")
        assert t.page.url.count("q=") == 1


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, str]]:
    """Queries that a page may misread: of lists, of NaN, of two versions, with `:` and `/` in a group.

    The newest window of each is empty.
    """
    desk = Desk(tmp_path_factory.mktemp("odd"))
    desk.now = T0 + HOUR
    desk.connect("jfk")
    measures = {"top": "top_k(distance, 3)", "n": "count()", "delay": "mean(dep_delay)"}
    lists = desk.register(name="lists", measures={"top": measures["top"]}, edges=["jfk"])
    routes = desk.register(name="routes", measures={"n": "count()"}, edges=["jfk"])
    nans = desk.register(name="nans", group_by=[], measures={"delay": measures["delay"]}, edges=["jfk"])
    held = desk.register(name="held", measures={"n": "count()"}, edges=["jfk"], budget={"error": {"n": 1000}})
    old = desk.register(name="changed", measures={"n": "count()"}, edges=["jfk"])
    for hour in range(3):
        start, groups = T0 + hour * HOUR, {"route:/api": 3, "null": 2} if hour < 2 else {}
        for query in (lists, routes, old):
            desk.report(query, "jfk", start, groups)
        records = {"distance": [1, 1], "dep_delay": [math.nan, 1.0]} if hour < 2 else {"distance": [], "dep_delay": []}
        columns = {name: pa.array(values, COLUMNS[name]) for name, values in records.items()}
        desk.ship(nans, "jfk", start, columns)
        desk.report(held, "jfk", start, {}, withheld=(Withheld("n", 5.0, 0.0, 1, rest=Rest(1, (5.0,))),))
    spec = QuerySpec.from_mapping({**SPEC, "name": "changed", "measures": {"n": "count()"}, "edges": ["jfk"],
                                   "where": "distance > 0"})  # fmt: skip
    new, _ = desk.catalog.queries.register(spec, desk.now, change=Change(T0 + 4 * HOUR, None))
    desk.ledger_knows(new)
    for store_hour in (4, 5):
        desk.report(new, "jfk", T0 + store_hour * HOUR, {"route:/api": 7} if store_hour == 4 else {})
    with desk.served(progress="200ms") as url:
        yield desk, url
    for store in (desk.catalog, desk.components, desk.results):
        store.close()


FALSE = re.compile(r"No window has an answer|every record is shipped|cannot be shown|undefined|\[object")
"""What no page may say of these queries: all have answers."""


@needs_browser
def test_no_page_says_what_is_false_of_lists_empty_windows_versions_nan_and_any_group(browser, odd):
    _, url = odd
    border, names = rfc3339(T0 + 4 * HOUR), ("lists", "routes", "nans", "held", "changed")
    with tab(browser, url) as t:
        t.open("/ui/")
        t.lists("tr[data-given]", len(names))
        overview = {name: t.text(f"tr[data-query={name}]") for name in names}
        assert "no record yet" not in "".join(overview.values()) and "withheld: in no group" in overview["held"]
        assert not FALSE.search(t.text("main"))
        panels = [*names, f"changed?end={border}", "routes?group=carrier%3Aroute%3A%2Fapi", "lists?group=broken"]
        t.open("/ui/dashboard?" + "&".join(f"q={quote(p, safe='')}" for p in panels))
        ends = "main section .chart, main section .empty, main section .problem"
        t.until("([s, n]) => document.querySelectorAll(s).length === n", [ends, len(panels)])
        shown = dict(zip(panels, t.page.locator("main section").all_inner_texts(), strict=True))
        assert not FALSE.search(t.text("main"))
        assert "top is a list" in shown["lists"] and "3 windows" in shown["lists"]
        assert (
            "carrier=route:/api" in shown["routes?group=carrier%3Aroute%3A%2Fapi"]
            and "NaN" in shown["nans"]
            and "unknown" not in shown["nans"]
        )
        assert "edges withhold them" in shown["held"] and "expected column:value" in shown["lists?group=broken"]
        assert "final" in shown[f"changed?end={border}"]
        for name in names:
            t.open(f"/ui/queries/{name}")
            t.until("() => document.querySelector('section[aria-label=Groups]')")
            t.until("() => document.querySelector('details table tbody tr')")
            assert not FALSE.search(t.text("main")), name


@needs_browser
def test_a_group_of_an_address_may_have_the_notation_of_the_api_and_no_address_makes_a_blank_page(browser, odd):
    _, url = odd
    at = quote(rfc3339(T0), safe="")
    with tab(browser, url) as t:
        t.open("/ui/queries/routes?group=carrier%3Aroute%3A%2Fapi")
        t.lists("details table tbody tr td:nth-child(3)", 2)
        assert t.lists("details table tbody tr td:nth-child(3)", 2) == ["3", "3"]
        assert "carrier=route:/api" in t.text("section[aria-label=Chart]")
        for path in ("queries/routes?group=route%3A%2Fapi", "queries/routes?group=%7B", "queries/routes?group=5",
                     "queries/routes?zoom=a_b&start=never", f"queries/routes/{at}?group=carrier:route:/api",
                     "queries/routes/never", "queries/%E0%A4%A", "budget/routes", "budget", "edges?query=changed",
                     "edit/routes", "new", f"queries/nans/{at}", f"queries/lists/{at}"):  # fmt: skip
            t.open(f"/ui/{path}")
            t.until("() => document.querySelector('main h1')?.innerText.length > 0")
            assert not re.search(r"every record is shipped|undefined|\[object", t.text("main")), path
        t.open(f"/ui/queries/nans/{at}")
        t.shows("Why is delay NaN?")
        t.open(f"/ui/queries/lists/{at}")
        t.shows("What is in top?")
        t.errors.clear()  # the address that cannot be decoded
