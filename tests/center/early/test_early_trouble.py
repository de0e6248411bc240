"""Silent and new edges, restarts, wrong clocks and overload under an accuracy. Seeds are fixed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from center.budgets.processing_delay import AnswerMargin
from center.ledger import EdgesChanged, Ledger, early_answers, pack_state
from center.ledger.state import EstimatorLogEntry
from edge.core.core import EdgeCore
from edge.core.events import Configured, SamplingSet
from edge.core.streams import StreamSpec
from edgewater.answers import Phase
from edgewater.base.streams import LIVE
from tests.cells import at_night
from tests.center.accuracy_world import (
    BEGIN_MS,
    COLUMNS,
    DISORDER_MS,
    REF,
    WINDOW_MS,
    Site,
    World,
    exponential,
    first_answers,
    record_of,
    spec,
    wait_ms,
)
from tests.center.snapshots import snapshot
from tests.center.statement_world import missing, violations

pytestmark = pytest.mark.slow


def sites(count: int = 3, seconds: float = 20, **more: object) -> list[Site]:
    return [Site.make(f"e{i}", i, seconds, exponential(80.0), rate=300.0, **more) for i in range(count)]


def prediction(emission):  # type: ignore[no-untyped-def]
    return emission.prediction


GROUPS = pytest.mark.parametrize("groups", [True, *at_night(False)])


def two_worlds(groups: bool, count: int) -> list[World]:
    """Returns two equal worlds, with one prediction per window or with a prediction per group."""
    if not groups:
        return [World(spec(), sites(count)) for _ in range(2)]
    accuracy = {"error": "20%", "measure": "total", "substream": "500ms", "scope": "all"}
    more = {"shares": (1.0, 1.0, 0.02), "slower": (0.5, 1.0, 2.0)}
    return [World(spec(group_by=["k"], accuracy=accuracy), sites(count, **more)) for _ in range(2)]


def test_a_silent_edge_widens_the_interval_and_neither_blocks_nor_is_ignored() -> None:
    world = World(spec(accuracy={"error": "15%", "measure": "total", "substream": "500ms"}), sites(5))
    silent_from = BEGIN_MS + 10_000
    world.sites[2].cut = (silent_from, silent_from + 6_000)
    world.run(20.5)
    answers = first_answers(world.answers)
    before = [a for a in answers if a.window_end_ms <= silent_from - 1_000][2:]
    during = [a for a in answers if silent_from + 3_000 <= a.window_end_ms < silent_from + 6_000]
    assert len(during) == 3
    for answer in during:
        assert answer.phase is Phase.EARLY
        assert wait_ms(answer) <= 1_700, "it waits for the edge until its timeout"
        p = prediction(answer)
        assert p.silent == ("e2",) and 0 < p.missing < 0.2 * p.estimate, (
            "the interval follows the variation of its usual rate"
        )
        assert p.lower < world.truth(answer.window_start_ms) < p.upper
        truth = world.truth(answer.window_start_ms)
        assert abs(p.estimate - truth) / truth < 0.2, "the edge is expected at its usual rate"
        assert "e2" in missing(answer)
    widths = [prediction(a).half_width for a in during]
    assert min(widths) > np.median([prediction(a).half_width for a in before])
    after = [a for a in answers if a.window_start_ms >= silent_from + 7_500]
    assert after and all(prediction(a).silent == () for a in after)
    for start in (a.window_start_ms for a in during):
        last = [e for e in world.answers if e.window_start_ms == start][-1]
        assert last.phase is not Phase.EARLY, "its windows become complete when it reports again"


@GROUPS
def test_a_restart_gives_the_answers_of_an_uninterrupted_run(groups: bool) -> None:
    whole, cut = two_worlds(groups, 2)
    for world in (whole, cut):
        world.sites[1].cut = (BEGIN_MS + 4_000, BEGIN_MS + 6_500)
    whole.run(9)
    for _ in range(5):
        cut.run(1.8)
        cut.restart()
    assert cut.answers == whole.answers
    assert len(whole.answers) >= 10 and any(a.phase is Phase.EARLY for a in whole.answers)


@pytest.mark.nightly
def test_a_failed_transaction_leaves_the_estimator_unchanged() -> None:
    whole, torn = (World(spec(), sites()) for _ in range(2))
    whole.run(5)
    handle = torn.ledger.handle

    class Torn(Exception):
        pass

    def twice(event):  # type: ignore[no-untyped-def]
        """Handles each event in a transaction that fails, loads the state before it, and handles the event again."""
        before = {ref: snapshot(torn.ledger, ref) for ref in torn.ledger.queries()}
        try:
            with torn.ledger.transaction() as transaction:
                handle(event)
                transaction.changes()
                raise Torn
        except Torn:
            torn.ledger.load(before)
        with torn.ledger.transaction() as transaction:
            result = handle(event)
            transaction.changes()
        return result

    torn.ledger.handle = twice  # type: ignore[method-assign]
    torn.run(5)
    assert torn.answers == whole.answers


@pytest.mark.nightly
@GROUPS
@pytest.mark.parametrize("compact_bytes", [1 << 18, 10_000], ids=["log", "snapshot"])
def test_the_state_written_per_transaction_restores_the_estimator(
    compact_bytes: int, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes of each transaction, and nothing else, are stored and restored."""
    monkeypatch.setattr(early_answers, "COMPACT_BYTES", compact_bytes)
    whole, other = two_worlds(groups, 2)
    whole.run(9)
    heads: dict[str, str] = {}
    parts: dict[tuple[str, int], str] = {}
    handle = other.ledger.handle

    def written(event):  # type: ignore[no-untyped-def]
        with other.ledger.transaction() as transaction:
            result = handle(event)
            for change in transaction.changes():
                if change.state is not None:
                    heads["q"] = change.state
                for kind, start, text in change.entries:
                    if text is None:
                        parts.pop((kind, start), None)
                    else:
                        parts[kind, start] = text
        return result

    other.ledger.handle = written  # type: ignore[method-assign]
    other.run(5)
    ledger = Ledger(AnswerMargin(50))
    ledger.handle(EdgesChanged(tuple(record_of(s.name) for s in other.sites)))
    assert (("estimator", early_answers.SNAPSHOT) in parts) == (compact_bytes < 1 << 18)
    head = heads.get("q") or other.ledger.book(REF).state.to_state()
    ledger.restore(REF, pack_state(head, ((k, s, t) for (k, s), t in sorted(parts.items()))))
    other.ledger = ledger
    other.run(4)
    assert other.answers == whole.answers


@pytest.mark.parametrize("spans", [{}, {"e0": [[0, 9, 3]]}], ids=["all processed", "sampled"])
def test_the_estimator_begins_without_history_after_a_snapshot_of_release_0_3_0(spans: dict[str, object]) -> None:
    world = World(spec(), sites(2))
    world.run(5)
    slot = world.estimator().observed.slot
    old = {"reasons": {"spans": spans, "reported_through": {}}, "slot": slot - 9}
    texts = {early_answers.SNAPSHOT: json.dumps(old), 0: json.dumps([["advance", slot, []]])}
    entries = [("estimator", number, EstimatorLogEntry(text)) for number, text in texts.items()]
    book = early_answers.EarlyAnswerBook(world.ledger.book(REF).state, entries, 50)
    observed = book.estimator.observed
    assert not observed.has_begun
    start_ms = book.estimator.schedule.starts_at(slot)
    assert observed.has_unknown_sample(start_ms - 1_000) == bool(spans) and not observed.has_unknown_sample(start_ms)


def test_an_edge_that_joins_becomes_a_source() -> None:
    world = World(spec(), sites(2))
    world.run(6)
    newcomer = Site.make("e9", 9, 20, exponential(80.0), rate=300.0)
    newcomer.at = int(np.searchsorted(newcomer.arrival, world.now_ms))
    newcomer.core.handle(Configured(((REF, world.query),)))
    world.sites.append(newcomer)
    world.ledger.handle(EdgesChanged(tuple(record_of(s.name) for s in world.sites)))
    world.run(6)
    grid = world.estimator().schedule.grid
    # Its age is counted from the center's slot, which is at most a sub-stream old.
    known_ms = BEGIN_MS + 6_000 - grid.substream_ms + grid.lags * grid.slot_ms + WINDOW_MS
    for answer in world.answers:
        if answer.phase is Phase.EARLY and BEGIN_MS + 6_500 < answer.answered_at_ms < known_ms:
            assert answer.codes(), "the delays of the newcomer are not known"
    joined = [a for a in first_answers(world.answers) if BEGIN_MS + 9_000 <= a.window_start_ms < BEGIN_MS + 11_000]
    for answer in joined:
        truth = world.truth(answer.window_start_ms)
        assert abs(prediction(answer).estimate - truth) / truth < 0.1
    assert joined
    assert world.estimator().observed.edges == ["e0", "e1", "e9"]


@pytest.mark.nightly
def test_a_skewed_clock_is_corrected_by_the_offset_of_the_session() -> None:
    right, wrong = World(spec(), sites(2)), World(spec(), sites(2))
    wrong.sites[1].ahead_ms = 400
    offset = SamplingSet(REF, 1.0, 400.0)
    wrong.sites[1].core.handle(offset)
    for world in (right, wrong):
        world.run(9)
    for a, b in zip(first_answers(right.answers)[1:7], first_answers(wrong.answers)[1:7], strict=True):
        assert a.window_start_ms == b.window_start_ms
        assert prediction(a).estimate == prediction(b).estimate
        assert prediction(b).met


@pytest.mark.nightly
def test_an_edge_whose_clock_is_a_day_ahead_does_not_advance_the_others() -> None:
    world = World(spec(), sites(3))
    world.sites[2].ahead_ms = 86_400_000
    world.run(9)
    answers = [a for a in first_answers(world.answers) if a.window_start_ms >= BEGIN_MS + 2_000]
    assert len(answers) >= 5
    for answer in answers:
        assert answer.phase is Phase.EARLY
        assert wait_ms(answer) <= 1_700
        assert prediction(answer).silent == ("e2",)
        (violation,) = violations(answer)
        assert "no report has arrived from e2" in violation.message
    assert world.estimator().observed.slot < world.estimator().schedule.slot_at(world.now_ms + 100)


@GROUPS
def test_an_edge_core_restored_from_its_state_sends_the_same_frames(groups: bool) -> None:
    whole, cut = two_worlds(groups, 1)
    whole.run(4)
    for _ in range(10):
        cut.run(0.4)
        core = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, DISORDER_MS, 3_000)}, source=1)
        state = cut.sites[0].core.to_state()
        core.restore(state)
        assert core.to_state() == state
        cut.sites[0].core = core
    assert (cut.frames, cut.bytes) == (whole.frames, whole.bytes)
    assert cut.answers == whole.answers


@pytest.mark.nightly
def test_records_that_arrive_after_a_long_silence_are_all_in_the_final_answer() -> None:
    world = World(spec(lateness="10s"), sites(2, 10))
    world.sites[1].cut = (BEGIN_MS + 3_000, BEGIN_MS + 9_000)
    world.run(14)
    for window in range(1, 7):
        start = BEGIN_MS + window * WINDOW_MS
        last = [e for e in world.answers if e.window_start_ms == start][-1]
        born = sum(int(((s.born >= start) & (s.born < start + WINDOW_MS)).sum()) for s in world.sites)
        assert last.facts.observed == born
