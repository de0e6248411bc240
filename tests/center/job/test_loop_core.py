"""The core of the job's loop, without anything around it: order, lanes, bisecting, terms."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from center.job.loop_core import (
    ANSWER_DEATHS,
    DEATHS,
    FIRST_DELAY_S,
    LOOK_DELAY_S,
    MAX_CULPRITS,
    MAX_HEAVY,
    SILENT_S,
    AnswersWanted,
    Applied,
    Apply,
    Cancel,
    Effect,
    Event,
    Fault,
    GiveAnswers,
    Lane,
    Look,
    Looked,
    LookFailed,
    LoopCore,
    MergeAnswers,
    Merged,
    MergeFailed,
    NotApplied,
    Pause,
    Probe,
    Probed,
    QueryFault,
    Released,
    Run,
    SetFrameAside,
    Submit,
    Sweep,
    TermBegan,
    TermEnded,
    Woken,
)
from center.storage.frame_log import FrameEntry
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import query_from_key

At = tuple[str, int]


def entry(key: str, position: int, edge: str = "e") -> FrameEntry:
    return FrameEntry(query_from_key(key), position, EdgeId(edge), "i", position, 0, "s", 0, 1, 1, 0)


def run_of(**spans: tuple[int, int]) -> Run:
    """Frames of queries, by name: after and through."""
    frames = tuple((f"{q}@1", entry(f"{q}@1", n)) for q, (a, t) in sorted(spans.items()) for n in range(a + 1, t + 1))
    return Run(frames, {f"{q}@1": a for q, (a, _) in spans.items()}, {f"{q}@1": t for q, (_, t) in spans.items()})


class Around:
    """What surrounds the core: an index, a store and workers. Frames in `kills` end their worker; frames in `fails`
    cannot be applied; queries in `broken` apply nothing; queries in `heavy` are heavy."""

    def __init__(self, last: dict[str, int], most: int = 1000, edges: Collection[str] = ("e",)) -> None:
        self.core, self.now_s, self.last, self.most = LoopCore(), 0.0, dict(last), most
        self.edges = list(edges)
        self.applied: dict[str, int] = {}
        self.lost: list[At] = []
        self.paused: set[str] = set()
        self.kills: set[At] = set()
        self.fails: set[At] = set()
        self.broken: set[str] = set()
        self.heavy: set[str] = set()
        self.refused_writes: Counter[At] = Counter()
        self.merging: deque[tuple[int, Run, Lane]] = deque()
        self.log: list[Effect] = []

    def handle(self, event: Event) -> None:
        effects = deque(self.core.handle(event, self.now_s))
        while effects:
            effect = effects.popleft()
            self.log.append(effect)
            if (answer := self._do(effect)) is not None:
                effects.extendleft(reversed(self.core.handle(answer, self.now_s)))

    def _do(self, effect: Effect) -> Event | None:
        match effect:
            case Look(after, without, heavy):
                applied = None if after is not None else dict(self.applied)
                begins = applied if after is None else after
                assert begins is not None
                spans = {
                    key: (begins.get(key, 0), min(end, begins.get(key, 0) + self.most))
                    for key, end in self.last.items()
                    if end > begins.get(key, 0) and key not in without
                }
                light = self._run({key: span for key, span in spans.items() if key not in self.heavy})
                alone = [self._run({key: span}) for key, span in spans.items() if key in self.heavy]
                return Looked(applied, light if light.through else None, None, tuple(alone[:heavy]))
            case Submit(number, run, lane):
                self.merging.append((number, run, lane))
            case Apply(number, run):
                return Applied(number, {key: f for key in run.through if (f := self._apply(run.of({key}), key))})
            case SetFrameAside(number, run, _):
                ((key, frame),) = run.frames
                if self.refused_writes[key, frame.position] > 0:
                    self.refused_writes[key, frame.position] -= 1
                    return NotApplied(number, "database")
                if key in self.broken:
                    return Applied(number, {key: QueryFault("broken")})
                self._advance(key, run)
                self.lost.append((key, frame.position))
                return Applied(number)
            case Probe(number):
                return Probed(number, True)
            case Pause(key, _):
                self.paused.add(key)
            case MergeAnswers(number, key):
                self.merging.append((number, Run((), {}, {key: 0}), Lane.ANSWER))
            case GiveAnswers(number, _):
                return Applied(number)
        return None

    def _run(self, spans: dict[str, tuple[int, int]]) -> Run:
        frames = tuple((k, self.entry(k, n)) for k, (a, t) in sorted(spans.items()) for n in range(a + 1, t + 1))
        return Run(frames, {k: a for k, (a, _) in spans.items()}, {k: t for k, (_, t) in spans.items()})

    def entry(self, key: str, position: int) -> FrameEntry:
        return entry(key, position, self.edges[position % len(self.edges)])

    def _apply(self, run: Run, key: str) -> QueryFault | None:
        if key in self.broken or any((key, e.position) in self.fails for _, e in run.frames):
            return QueryFault("odd")
        self._advance(key, run)
        return None

    def _advance(self, key: str, run: Run) -> None:
        assert self.applied.get(key, 0) == run.after[key], "in order, each once"
        assert [e.position for _, e in run.frames] == list(range(run.after[key] + 1, run.through[key] + 1))
        self.applied[key] = run.through[key]

    def finish(self, choose: st.DataObject | None = None, most: int = 10_000) -> None:
        """Lets tasks end, one after the other, until nothing runs and nothing is due."""
        for _ in range(most):
            if self.merging:
                if choose is not None and choose.draw(st.booleans()):
                    self.merging.rotate()
                number, run, _ = self.merging.popleft()
                dies = any((key, e.position) in self.kills for key, e in run.frames)
                self.handle(MergeFailed(number, Fault.FRAMES, "killed") if dies else Merged(number))
            elif (due_s := self.core.next_deadline()) is not None:
                self.now_s = max(self.now_s, due_s)
                self.handle(Woken())
            else:
                return
        raise AssertionError("it does not come to an end")


def began(around: Around, *set_aside: str) -> Around:
    around.handle(TermBegan(frozenset(set_aside)))
    return around


def test_a_heavy_query_is_a_plan_of_its_own_that_no_light_query_waits_for() -> None:
    around = Around({"a@1": 3, "b@1": 3, "heavy@1": 9}, most=3)
    around.heavy = {"heavy@1"}
    began(around)
    (number, _, lane), light = around.merging
    assert (lane, light[2], set(light[1].through)) == (Lane.HEAVY, Lane.LIGHT, {"a@1", "b@1"})
    for end in (4, 5, 6):  # the heavy plan is still merged
        around.merging.clear()
        around.handle(Merged(light[0]))
        assert around.applied == {"a@1": 3, "b@1": end - 1}
        around.last["b@1"] = end
        around.handle(Woken())
        (light,) = around.merging
        assert set(light[1].through) == {"b@1"}, "a heavy query has one plan at a time"
    around.handle(Merged(number))
    around.finish()
    assert around.applied == around.last


def test_the_plans_of_heavy_queries_are_limited() -> None:
    around = Around({f"{n}@1": 1 for n in range(MAX_HEAVY + 3)})
    around.heavy = set(around.last)
    began(around)
    assert len(around.merging) == MAX_HEAVY
    around.finish()
    assert around.applied == around.last


def test_the_next_plan_is_merged_while_one_is_applied_and_no_third_one_is() -> None:
    core = LoopCore()
    look, *_ = core.handle(TermBegan(frozenset()), 0.0)
    assert look == Look(None, frozenset())
    (submit,) = core.handle(Looked({}, run_of(a=(0, 1))), 0.0)
    assert isinstance(submit, Submit)
    look, apply = core.handle(Merged(submit.number), 0.0)
    assert look == Look({"a@1": 1}, frozenset()) and apply == Apply(submit.number, run_of(a=(0, 1)))
    (second,) = core.handle(Looked(None, run_of(a=(1, 2))), 0.0)
    assert isinstance(second, Submit)
    assert core.handle(Merged(second.number), 0.0) == [], "until the first one is applied"
    assert core.handle(Woken(), 0.0) == []
    sweep, look, apply = core.handle(Applied(submit.number), 0.0)
    assert (sweep, look, apply) == (Sweep(), Look({"a@1": 2}, frozenset()), Apply(second.number, run_of(a=(1, 2))))


@given(
    data=st.data(),
    last=st.dictionaries(st.sampled_from(["a@1", "b@1", "c@1"]), st.integers(1, 9), min_size=1),
    most=st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_each_frame_is_applied_once_in_order_or_lost_alone_whatever_fails(
    data: st.DataObject, last: dict[str, int], most: int
) -> None:
    every = [(key, n) for key, end in last.items() for n in range(1, end + 1)]
    around = Around(last, most)
    around.kills = data.draw(st.sets(st.sampled_from(every)))
    around.fails = data.draw(st.sets(st.sampled_from(every)))
    around.heavy = data.draw(st.sets(st.sampled_from(sorted(last))))
    began(around)
    around.finish(data)
    assert around.applied == last
    assert sorted(around.lost) == sorted(around.kills | around.fails), "no other frame"
    assert not around.paused and around.core.problem == "" and around.core.is_caught_up


class Unsteady(Around):
    """As `Around`, in an order of events that is drawn: databases and disks fail, terms end, results come late."""

    def __init__(self, data: st.DataObject, last: dict[str, int], most: int) -> None:
        super().__init__(last, most, edges=("e", "f"))
        self._data, self._is_calm = data, False
        self._probing: list[int] = []
        self._past: list[Merged | MergeFailed | Probed | Applied | NotApplied] = []

    def _is_bad(self) -> bool:
        return not self._is_calm and self._data.draw(st.integers(0, 5)) == 0

    def _do(self, effect: Effect) -> Event | None:
        if isinstance(effect, Look) and self._is_bad():
            applied = dict(self.applied) if effect.after is None else None
            return LookFailed("database") if self._is_bad() else Looked(applied, None, self.now_s + 0.005)
        if isinstance(effect, Apply | SetFrameAside) and self._is_bad():
            if self._is_bad():
                super()._do(effect)  # it was applied, and the driver does not know it
            return NotApplied(effect.number, "database")
        if isinstance(effect, Probe):
            self._probing.append(effect.number)
            return None
        answer = super()._do(effect)
        self._past += [answer] if isinstance(answer, Applied) else []
        return answer

    def step(self) -> None:
        match self._data.draw(st.sampled_from(["merge", "merge", "probe", "time", "late", "term", "frame"])):
            case "merge" if self.merging:
                number, run, _ = self.merging.popleft()
                dies = any((key, e.position) in self.kills for key, e in run.frames)
                failed = MergeFailed(number, Fault.SYSTEM if self._is_bad() else Fault.FRAMES, "no result")
                self._past.append(failed if dies or self._is_bad() else Merged(number))
                self.handle(self._past[-1])
            case "probe" if self._probing:
                self._past.append(Probed(self._probing.pop(), not self._is_bad()))
                self.handle(self._past[-1])
            case "late" if self._past:
                event = self._data.draw(st.sampled_from(self._past))
                self.handle(Woken() if self.core.has_plan(event.number) else event)
            case "term":
                self.handle(TermEnded())
                self.handle(TermBegan(frozenset()))
            case "frame":
                self.last[self._data.draw(st.sampled_from(sorted(self.last)))] += 1
            case _:
                self.now_s += self._data.draw(st.sampled_from([0.001, 1.0, 25.0]))
        self.handle(Woken())

    def settle(self) -> None:
        """No further fault comes, and late results still do."""
        self._is_calm = True
        while True:
            self.finish()
            if not self._probing:
                return
            self.handle(Probed(self._probing.pop(), True))


@given(
    data=st.data(),
    last=st.dictionaries(st.sampled_from(["a@1", "b@1", "c@1"]), st.integers(1, 5), min_size=1),
    most=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost_applied_twice_or_due_in_the_past_in_any_order_of_events(
    data: st.DataObject, last: dict[str, int], most: int
) -> None:
    every = [(key, n) for key, end in last.items() for n in range(1, end + 1)]
    around = Unsteady(data, last, most)
    around.kills = data.draw(st.sets(st.sampled_from(every), max_size=3))
    around.fails = data.draw(st.sets(st.sampled_from(every), max_size=3))
    around.heavy = data.draw(st.sets(st.sampled_from(sorted(last))))
    began(around)
    for _ in range(data.draw(st.integers(0, 30))):
        around.step()
        due_s = around.core.next_deadline()
        assert due_s is None or due_s > around.now_s, "else the driver never rests"
    around.settle()
    assert around.applied == around.last and not around.paused
    assert set(around.lost) <= around.kills | around.fails
    assert not around.core.is_busy and around.core.problem == "" and around.core.is_caught_up


def test_frames_of_one_edge_never_pause_a_query_and_those_of_several_do() -> None:
    many = MAX_CULPRITS + 5
    for edges, paused in ((("e",), set()), (("e", "f"), {"a@1"})):
        around = Around({"a@1": many, "b@1": 3}, edges=edges)
        around.fails = {("a@1", n) for n in range(1, many + 1)}
        began(around)
        around.finish()
        assert around.paused == paused
        assert around.applied["b@1"] == 3
        assert len(around.lost) == (MAX_CULPRITS if paused else many)


def test_a_database_that_refuses_writes_pauses_no_query() -> None:
    around = Around({"a@1": 2}, edges=("e", "f"))
    around.fails, around.refused_writes = {("a@1", 1), ("a@1", 2)}, Counter({("a@1", 2): 3 * MAX_CULPRITS})
    began(around)
    around.finish()
    assert not around.paused and around.lost == [("a@1", 1), ("a@1", 2)]


def test_a_query_whose_losses_cannot_be_applied_is_paused_and_goes_on_when_it_is_released() -> None:
    around = Around({"a@1": 2, "b@1": 2})
    around.broken = {"a@1"}
    began(around)
    around.finish()
    assert (around.paused, around.applied, around.core.set_aside) == ({"a@1"}, {"b@1": 2}, frozenset({"a@1"}))
    around.broken = set()
    around.handle(Released("a@1"))
    around.finish()
    assert around.applied == {"a@1": 2, "b@1": 2}


def test_other_queries_are_planned_while_suspects_are_tried() -> None:
    around = Around({"a@1": 4, "b@1": 1})
    around.kills = {("a@1", 3)}
    began(around)
    number, _, lane = around.merging.popleft()
    assert lane is Lane.LIGHT
    around.last["c@1"] = 1
    around.handle(MergeFailed(number, Fault.FRAMES, "killed"))
    assert {(lane, *sorted(run.through)) for _, run, lane in around.merging} == {
        (Lane.SUSPECT, "a@1"), (Lane.LIGHT, "c@1"),
    }  # fmt: skip
    around.finish()
    assert around.lost == [("a@1", 3)] and around.applied == around.last


def test_a_silent_suspect_is_cancelled_and_counts_as_dead() -> None:
    around = Around({"a@1": 1})
    around.kills = {("a@1", 1)}
    began(around)
    around.handle(MergeFailed(around.merging.popleft()[0], Fault.FRAMES, "killed"))
    for _ in range(DEATHS):
        number, _, lane = around.merging.popleft()
        assert lane is Lane.SUSPECT
        around.now_s += SILENT_S
        around.handle(Woken())
        assert Cancel(number) in around.log
        around.handle(MergeFailed(number, Fault.FRAMES, "cancelled"))
    assert around.lost == [("a@1", 1)]


def test_a_silent_light_plan_is_cancelled_and_its_frames_are_merged_apart() -> None:
    around = began(Around({"a@1": 2}))
    number, _, lane = around.merging.popleft()
    assert lane is Lane.LIGHT
    around.now_s += SILENT_S
    around.handle(Woken())
    assert Cancel(number) in around.log
    around.handle(MergeFailed(number, Fault.FRAMES, "cancelled"))
    around.finish()
    assert not around.lost and around.applied == around.last


def test_no_frames_are_applied_to_a_query_while_its_answers_are_merged_and_others_go_on() -> None:
    around = began(Around({"a@1": 2, "heavy@1": 1}, most=1))
    around.heavy = {"heavy@1"}
    around.finish()
    around.last |= {"a@1": 4, "heavy@1": 3}
    around.handle(Woken())
    around.handle(AnswersWanted("heavy@1"))
    answers = next(each for each in around.merging if each[2] is Lane.ANSWER)
    around.merging.remove(answers)
    around.finish()
    assert around.applied == {"a@1": 4, "heavy@1": 1}
    around.handle(Merged(answers[0]))
    assert GiveAnswers(answers[0], "heavy@1") in around.log
    around.finish()
    assert around.applied == around.last


def test_answers_that_are_wanted_again_or_in_another_term_are_merged_again() -> None:
    around = began(Around({}))
    around.handle(AnswersWanted("a@1"))
    ((first, *_),) = around.merging
    around.handle(AnswersWanted("a@1"))
    assert Cancel(first) in around.log
    around.handle(Merged(first))
    around.handle(TermEnded())
    around.handle(TermBegan(frozenset({"b@1"})))
    around.handle(AnswersWanted("a@1"))
    around.handle(AnswersWanted("b@1"))
    last = around.merging[-1][0]
    around.handle(Merged(last))
    given = [effect for effect in around.log if isinstance(effect, GiveAnswers)]
    assert given == [GiveAnswers(last, "a@1")] and not around.core.is_busy


def test_a_merge_of_answers_that_ends_workers_pauses_its_query() -> None:
    around = began(Around({"a@1": 1}))
    around.handle(AnswersWanted("a@1"))
    for _ in range(ANSWER_DEATHS):
        assert around.paused == set()
        number = around.merging.pop()[0]
        around.handle(MergeFailed(number, Fault.FRAMES, "killed"))
    assert around.paused == {"a@1"} and around.core.set_aside == {"a@1"}


def test_what_comes_of_an_earlier_term_changes_nothing() -> None:
    around = began(Around({"a@1": 2}, most=1))
    ((first, *_),) = around.merging
    around.handle(TermEnded())
    assert Cancel(first) in around.log
    around.merging.clear()
    around.applied = {"a@1": 1}  # another driver has led
    around.handle(TermBegan(frozenset()))
    around.handle(Merged(first))
    around.handle(MergeFailed(first, Fault.FRAMES, "killed"))
    around.handle(Applied(first))
    around.handle(NotApplied(first, "database"))
    around.finish()
    assert around.applied == {"a@1": 2} and around.lost == []


def test_after_a_failure_of_the_database_the_positions_are_read_again_and_the_delay_grows() -> None:
    core, looks = LoopCore(), list[Effect]()
    core.handle(TermBegan(frozenset()), 0.0)
    now_s = 0.0
    for attempt in range(4):
        (submit,) = core.handle(Looked({}, run_of(a=(0, 1))), now_s)
        assert isinstance(submit, Submit)
        core.handle(Merged(submit.number), now_s)
        core.handle(Looked(None, None), now_s)
        assert core.handle(NotApplied(submit.number, "database"), now_s) == []
        assert core.problem == "database" and not core.is_caught_up
        due_s = core.next_deadline()
        assert due_s is not None and due_s == now_s + FIRST_DELAY_S * 2**attempt
        assert core.handle(Woken(), (now_s + due_s) / 2) == []
        now_s = due_s
        looks += core.handle(Woken(), now_s)
    assert looks == [Look(None, frozenset())] * 4


def test_an_index_that_could_not_be_read_for_long_does_not_prolong_the_delays_afterwards() -> None:
    core, now_s = LoopCore(), 0.0
    core.handle(TermBegan(frozenset()), now_s)
    for _ in range(100):
        assert core.handle(LookFailed("database"), now_s) == []
        due_s = core.next_deadline()
        assert due_s is not None and due_s == now_s + LOOK_DELAY_S
        now_s = due_s
        assert core.handle(Woken(), now_s) == [Look(None, frozenset())]
    (submit,) = core.handle(Looked({}, run_of(a=(0, 1))), now_s)
    assert isinstance(submit, Submit)
    core.handle(MergeFailed(submit.number, Fault.SYSTEM, "database"), now_s)
    assert core.next_deadline() == now_s + FIRST_DELAY_S


def test_nothing_is_due_until_the_delay_after_a_failure_has_passed() -> None:
    core = LoopCore()
    core.handle(TermBegan(frozenset()), 0.0)
    (submit,) = core.handle(Looked({}, run_of(a=(0, 1))), 0.0)
    assert isinstance(submit, Submit)
    core.handle(Merged(submit.number), 0.0)
    core.handle(Looked(None, None, again_s=0.005), 0.0)
    core.handle(NotApplied(submit.number, "database"), 0.0)
    assert core.next_deadline() == FIRST_DELAY_S


def test_nothing_is_planned_after_a_frame_that_is_not_applied_until_the_positions_are_read() -> None:
    core = LoopCore()
    core.handle(TermBegan(frozenset()), 0.0)
    (submit,) = core.handle(Looked({}, run_of(a=(0, 1), b=(0, 1))), 0.0)
    assert isinstance(submit, Submit)
    core.handle(Merged(submit.number), 0.0)
    core.handle(Looked(None, None), 0.0)
    quarantine, *others = core.handle(Applied(submit.number, {"a@1": QueryFault("odd")}), 0.0)
    assert isinstance(quarantine, SetFrameAside) and others == [Sweep()]
    assert core.handle(NotApplied(quarantine.number, "database"), 0.0) == []
    assert core.handle(Woken(), FIRST_DELAY_S) == [Look(None, frozenset())]


def test_queries_that_are_set_aside_are_not_planned() -> None:
    around = began(Around({"a@1": 1, "b@1": 1}), "a@1")
    around.finish()
    assert around.applied == {"b@1": 1}


def test_halves_are_of_queries_and_then_of_a_prefix() -> None:
    run = run_of(a=(0, 2), b=(4, 5), c=(0, 3))
    assert run.halves() == [run_of(a=(0, 2)), run_of(b=(4, 5), c=(0, 3))]
    assert run_of(c=(0, 3)).halves() == [run_of(c=(0, 1)), run_of(c=(1, 3))]
    assert run_of(b=(4, 5)).halves() == [run_of(b=(4, 5))]
