"""`LoopCore`: what the job does next with the frames of the log. Deterministic: events in, effects out.

A plan is a run of frames of several queries. Its frames are merged together, by tasks, and applied together, in one
transaction. While a plan is applied, the next one is merged. The frames of a query are applied in order: a plan is
applied to a query only if it begins where the query's applied frames end.

All light queries of a look are one plan. Each heavy query is a plan of its own, which no other query waits for.

Frames that end workers, that need too much memory, or that the store cannot apply are found by bisecting: by query,
and then by prefix. They are tried in a lane of their own, while the other queries go on. A single frame that fails is
quarantined: it is applied as a stated loss of its edge. One edge must not be able to pause a query. So a query is
paused only if frames of several edges fail in a row, if its own state is at fault, or if not even a loss can be
applied. A frame is blamed for a worker's death only if a task without frames succeeds afterwards.

Costly answers of a query are merged by tasks, too. Until they are given, no frames are applied to the query: with each
of them the merge would begin again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from center.job.merge import Frame
from edgewater.base.streams import EdgeId

DEATHS = 2  # limit: deaths that one frame can cause
"""A frame that was alone is to blame after this many deaths of its worker. A worker may die for other reasons."""
MAX_CULPRITS = 8
"""How many frames of a query, from more than one edge, may be quarantined in a row. After so many without an applied
frame in between, the fault is not in the frames."""
SILENT_S = 60.0  # limit: the wait for a task that sleeps
"""How long the tasks of a light or suspect plan may take. Workers limit the CPU time of all tasks. Those of low
priority may wait for the CPU for longer; Spark ends those that are silent."""
PROBE_S = 5.0  # limit: time of a task without frames
"""If a task without frames takes longer, the machine is starved, and no frame is to blame."""
FIRST_DELAY_S, MAX_DELAY_S = 0.2, 5.0  # limit: attempts while something fails
"""Delay after a failure that is not the frames', doubled with each further one."""
LOOK_DELAY_S = 0.5  # limit: reads of an index that fails
"""Delay if the index cannot be read. It never grows, and it counts as no failure: when the database is back, the next
failure is the first one."""
ANSWER_DEATHS = 3  # limit: deaths that one query can cause
"""A query is paused after this many deaths of the workers that merge its answers."""
MAX_HEAVY = 2
"""The most plans of heavy queries that are merged or applied. It limits the memory for their results."""


class Lane(StrEnum):
    LIGHT = "light"
    HEAVY = "heavy"
    SUSPECT = "suspect"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Run:
    """Successive frames of queries.

    Attributes:
        frames: ordered by query and position.
        after, through: by query key, the positions before the first and of the last frame. Between them, frames may
            be missing in the index.
    """

    frames: tuple[Frame, ...]
    after: Mapping[str, int]
    through: Mapping[str, int]

    def of(self, keys: Collection[str]) -> Run:
        """Returns the part of some queries."""
        return Run(
            tuple(frame for frame in self.frames if frame[0] in keys),
            {key: at for key, at in self.after.items() if key in keys},
            {key: at for key, at in self.through.items() if key in keys},
        )

    def halves(self) -> list[Run]:
        """Returns two halves: of the queries, or of the frames of one query. One frame has no halves: returns it."""
        keys = sorted(self.through)
        if len(keys) > 1:
            middle = len(keys) // 2
            return [self.of(frozenset(keys[:middle])), self.of(frozenset(keys[middle:]))]
        if len(self.frames) < 2:
            return [self]
        (key,), first = keys, self.frames[: len(self.frames) // 2]
        at = {key: first[-1][1].position}
        return [Run(first, self.after, at), Run(self.frames[len(first) :], at, self.through)]


class Fault(Enum):
    """What a failure of a merge says. FRAMES: a worker died or was silent, or had too little memory. SYSTEM: the log or
    Spark failed, whatever the frames are.
    """

    FRAMES = "frames"
    SYSTEM = "system"


# Events


@dataclass(frozen=True, slots=True)
class TermBegan:
    """This driver leads from now on, except the queries that are set aside."""

    set_aside: frozenset[str]


@dataclass(frozen=True, slots=True)
class TermEnded:
    """This driver does not lead any more."""


@dataclass(frozen=True, slots=True)
class Woken:
    """The index may have new frames, or `next_deadline` has come."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The result of `Look`.

    Attributes:
        applied: the applied positions, if the look has read them from the store.
        run: the admitted frames of light queries; None: there are none.
        again_s: when to look again, because frames are expected; None: when the index changes.
        heavy: the admitted frames of heavy queries, each of one query.
    """

    applied: Mapping[str, int] | None
    run: Run | None
    again_s: float | None = None
    heavy: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class LookFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class Merged:
    """The tasks of a plan have returned."""

    number: int


@dataclass(frozen=True, slots=True)
class MergeFailed:
    """The tasks of a plan have failed."""

    number: int
    fault: Fault
    reason: str


@dataclass(frozen=True, slots=True)
class Probed:
    """A task without frames has ended; `works`: within `PROBE_S`, and without a failure."""

    number: int
    works: bool


@dataclass(frozen=True, slots=True)
class QueryFault:
    """Why the frames of a query were not applied, though the frames of others were.

    Attributes:
        is_state: the query is at fault, and not a frame.
    """

    reason: str
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """A plan was applied, except the queries in `failed`. Or the answers of `GiveAnswers` are written, as far as they
    are due.
    """

    number: int
    failed: Mapping[str, QueryFault] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotApplied:
    """A plan was not applied, or it is not known whether it was: a database or a disk failed."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """A query is no longer set aside."""

    key: str


@dataclass(frozen=True, slots=True)
class AnswersWanted:
    """Answers of a query are due that tasks must merge first."""

    key: str


Event = (
    TermBegan
    | TermEnded
    | Woken
    | Looked
    | LookFailed
    | Merged
    | MergeFailed
    | Probed
    | Applied
    | NotApplied
    | Released
    | AnswersWanted
)


# Effects


@dataclass(frozen=True, slots=True)
class Look:
    """Admit the next frames. The answer is `Looked` or `LookFailed`, before any other event.

    Attributes:
        after: positions up to which frames are planned, by query key. None: read the applied positions.
        without: queries whose frames are not planned.
        heavy: the most plans of heavy queries.
    """

    after: Mapping[str, int] | None
    without: frozenset[str]
    heavy: int = MAX_HEAVY


@dataclass(frozen=True, slots=True)
class Submit:
    """Merge a plan's frames by tasks. The answer is `Merged` or `MergeFailed`."""

    number: int
    run: Run
    lane: Lane


@dataclass(frozen=True, slots=True)
class Probe:
    """Run a task without frames. The answer is `Probed`."""

    number: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the tasks of a plan."""

    number: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the merged frames of some of a plan's queries. The answer is `Applied` or `NotApplied`."""

    number: int
    run: Run


@dataclass(frozen=True, slots=True)
class SetFrameAside:
    """Set a frame aside, and apply it as a loss. The answer is `Applied` or `NotApplied`."""

    number: int
    run: Run
    reason: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Set a query aside until a driver begins to lead."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class MergeAnswers:
    """Merge the costly answers of a query by tasks. The answer is `Merged` or `MergeFailed`."""

    number: int
    key: str


@dataclass(frozen=True, slots=True)
class GiveAnswers:
    """Write the answers whose merges are there. The answer is `Applied` or `NotApplied`."""

    number: int
    key: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """Drop what was applied and is no longer kept."""


Effect = Look | Submit | Probe | Cancel | Apply | SetFrameAside | Pause | MergeAnswers | GiveAnswers | Sweep


class _State(Enum):
    MERGING = 0
    CANCELLED = 1
    MERGED = 2
    APPLYING = 3


@dataclass(slots=True)
class _Plan:
    run: Run
    lane: Lane
    state: _State = _State.MERGING
    until_s: float | None = None
    is_verdict: bool = False


@dataclass(slots=True)
class _Answers:
    """Costly answers of a query. `number` is None until their merge may begin."""

    number: int | None = None
    deaths: int = 0


class LoopCore:
    """See the module.

    Attributes:
        problem: why frames are not applied now; empty: they are.
        is_caught_up: whether in this term a plan was applied, or no frame was left.
    """

    def __init__(self) -> None:
        self._number = 0
        self._culprits: dict[str, dict[int, EdgeId]] = {}
        self._set_aside: set[str] = set()
        self._begin(leads=False)

    def _begin(self, *, leads: bool) -> None:
        self._leads = leads
        self._applied: dict[str, int] | None = None
        self._plans: dict[int, _Plan] = {}
        self._answers: dict[str, _Answers] = {}
        self._suspects: deque[Run] = deque()
        self._deaths: Counter[Frame] = Counter()
        self._failures, self._must_look = 0, True
        self._resume_s: float | None = None
        self._again_s: float | None = None
        self.problem, self.is_caught_up = "", False

    @property
    def set_aside(self) -> frozenset[str]:
        return frozenset(self._set_aside)

    @property
    def is_busy(self) -> bool:
        """Whether there are frames that are planned and not applied, or answers that are merged."""
        return bool(self._plans or self._suspects or self._answers)

    def has_plan(self, number: int) -> bool:
        """Returns whether a plan, or a merge of answers, is neither applied nor dropped."""
        return number in self._plans or bool(self._key_of(number))

    def _key_of(self, number: int) -> str:
        """Returns the query whose answers have a number; empty: there is none."""
        return next((key for key, each in self._answers.items() if each.number == number), "")

    def next_deadline(self) -> float | None:
        """Returns when to call `handle` with `Woken` if nothing else happens."""
        look_s = self._again_s if self._resume_s is None else self._resume_s
        times = [look_s, *(plan.until_s for plan in self._plans.values())]
        return min((at_s for at_s in times if at_s is not None), default=None) if self._leads else None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Returns what to do after an event, in this order.

        Args:
            now_s: of a monotonic clock.
        """
        effects = self._after(event, now_s)
        return [*effects, *self._next(now_s)]

    def _after(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case TermBegan(set_aside):
                cancelled = self._cancel_all()
                self._set_aside, self._culprits = set(set_aside), {}
                self._begin(leads=True)
                return cancelled
            case TermEnded():
                cancelled = self._cancel_all()
                self._begin(leads=False)
                return cancelled
            case Released(key):
                self._set_aside.discard(key)
                self._must_look = True
            case Woken():
                self._must_look = True
                return self._end_silent(now_s)
            case AnswersWanted(key) if self._leads and key not in self._set_aside:
                merging, self._answers[key] = self._answers.get(key, _Answers()), _Answers()
                self._answers[key].deaths = merging.deaths
                return [] if merging.number is None else [Cancel(merging.number)]
            case Merged(number) | MergeFailed(number) | Probed(number) | Applied(number) | NotApplied(number) if (
                of := self._key_of(number)
            ):
                return self._after_answers(event, of, self._answers[of], now_s)
            case Looked():
                return self._plan(event, now_s)
            case LookFailed(reason):
                self.problem, self._must_look, self._resume_s = reason, True, now_s + LOOK_DELAY_S
            case Merged(number) if (plan := self._merging(number)) is not None:
                plan.state, plan.until_s = _State.MERGED, None
            case MergeFailed(number, fault, reason) if (plan := self._merging(number)) is not None:
                return self._merge_failed(number, plan, fault, reason, now_s)
            case Probed(number, works) if number in self._plans:
                return self._judge(self._plans.pop(number).run, works, now_s)
            case Applied(number, failed) if number in self._plans:
                return self._was_applied(self._plans.pop(number), failed)
            case NotApplied(number, reason) if number in self._plans:
                cancelled = self._cancel_all()
                self._plans, self._applied = {}, None
                self._suspects.clear()
                self._fail(reason, now_s)
                return cancelled
            case _:
                pass  # of a plan of another term
        return []

    def _next(self, now_s: float) -> list[Effect]:
        """Returns what the lanes are free for."""
        if not self._leads or (self._resume_s is not None and now_s < self._resume_s):
            return []
        if any(plan.state is _State.APPLYING for plan in self._plans.values()):
            return []  # if that fails, the applied positions are unknown
        self._resume_s = None
        effects = self._merge_answers()
        main = [plan for plan in self._plans.values() if plan.lane is not Lane.SUSPECT]
        light = [plan for plan in main if plan.lane is Lane.LIGHT]
        while self._suspects and len(main) == len(self._plans):
            if any(not plan.run.through.keys().isdisjoint(self._suspects[0].through) for plan in main):
                break  # an earlier plan of its queries is not applied yet
            run = self._suspects.popleft()
            if self._is_next(run):
                effects.append(self._submit(run, Lane.SUSPECT, now_s + SILENT_S))
        if self._must_look and len(light) < 2 and not any(p.state is _State.MERGING for p in light):
            self._must_look, self._again_s = False, None
            effects.append(Look(self._planned(), self._without(), MAX_HEAVY - len(main) + len(light)))
        return effects + self._apply_next()

    def _merge_answers(self) -> list[Effect]:
        effects: list[Effect] = []
        for key, answers in self._answers.items():
            if answers.number is None:
                self._number += 1
                answers.number = self._number
                effects.append(MergeAnswers(self._number, key))
        return effects

    def _after_answers(self, event: Event, key: str, answers: _Answers, now_s: float) -> list[Effect]:
        match event:
            case Merged(number):
                return [GiveAnswers(number, key)]
            case Applied():
                del self._answers[key]
                self._failures, self._resume_s, self.problem, self._must_look = 0, None, "", True
                return []
            case MergeFailed(number, Fault.FRAMES, reason):
                self.problem = reason
                return [Probe(number)]
            case Probed(_, True):
                answers.number, answers.deaths = None, answers.deaths + 1
                if answers.deaths >= ANSWER_DEATHS:
                    return self._pause(key, f"its answers cannot be merged: {self.problem}")
            case MergeFailed(_, _, reason) | NotApplied(_, reason):
                answers.number = None
                self._fail(reason, now_s)
            case Probed():
                answers.number = None
                self._fail(self.problem, now_s)
        return []

    def _apply_next(self) -> list[Effect]:
        for number, plan in sorted(self._plans.items(), key=lambda item: item[1].lane is Lane.HEAVY):
            if plan.state is not _State.MERGED:
                continue
            waits = plan.run.through.keys() & self._answers.keys()
            if waits and plan.lane is not Lane.LIGHT:
                continue
            left = self._set_aside | waits | (self._suspect_keys() if plan.lane is not Lane.SUSPECT else set())
            plan.run = plan.run.of(
                {key for key in plan.run.through if self._is_next(plan.run, key) and key not in left}
            )
            if plan.run.through:
                plan.state = _State.APPLYING
                return [Apply(number, plan.run)]
            del self._plans[number]  # its frames are planned again
            self._must_look = True
        return []

    def _plan(self, looked: Looked, now_s: float) -> list[Effect]:
        if looked.applied is not None:
            self._applied = dict(looked.applied)
        self._again_s = looked.again_s
        effects: list[Effect] = [self._submit(run, Lane.HEAVY, None) for run in looked.heavy]
        if looked.run is not None:
            effects.append(self._submit(looked.run, Lane.LIGHT, now_s + SILENT_S))
        if effects:
            self._must_look = True  # after this one
        elif looked.again_s is None and not self._plans and not self._suspects:
            self._recovered()
            effects.append(Sweep())
        return effects

    def _submit(self, run: Run, lane: Lane, until_s: float | None) -> Submit:
        self._number += 1
        self._plans[self._number] = _Plan(run, lane, until_s=until_s)
        return Submit(self._number, run, lane)

    def _merging(self, number: int) -> _Plan | None:
        plan = self._plans.get(number)
        return plan if plan is not None and plan.state in (_State.MERGING, _State.CANCELLED) else None

    def _planned(self) -> dict[str, int] | None:
        """Returns the positions up to which frames are applied, or in plans that follow on the applied frames."""
        if self._applied is None:
            return None
        planned = dict(self._applied)
        for plan in self._plans.values():
            if plan.lane is not Lane.SUSPECT:
                for key, through in plan.run.through.items():
                    if planned.get(key, 0) == plan.run.after[key]:
                        planned[key] = through
        return planned

    def _is_next(self, run: Run, key: str | None = None) -> bool:
        """Returns whether a run begins where the applied frames of its queries end, or of one query."""
        applied = self._applied or {}
        return all(applied.get(k, 0) == run.after[k] for k in (run.through if key is None else (key,)))

    def _suspect_keys(self) -> set[str]:
        runs = [*self._suspects, *(plan.run for plan in self._plans.values() if plan.lane is Lane.SUSPECT)]
        return {key for run in runs for key in run.through}

    def _without(self) -> frozenset[str]:
        heavy = {key for plan in self._plans.values() if plan.lane is Lane.HEAVY for key in plan.run.through}
        return frozenset(self._set_aside | self._suspect_keys() | self._answers.keys() | heavy)

    def _merge_failed(self, number: int, plan: _Plan, fault: Fault, reason: str, now_s: float) -> list[Effect]:
        self.problem = reason
        halves = plan.run.halves()
        if fault is Fault.SYSTEM:
            del self._plans[number]
            if plan.lane is Lane.SUSPECT:
                self._suspects.appendleft(plan.run)
            self._fail(reason, now_s)
        elif len(halves) > 1 or plan.lane is not Lane.SUSPECT:
            del self._plans[number]
            self._suspects.extendleft(reversed(halves))
        else:
            plan.until_s = None
            return [Probe(number)]
        self._must_look = True
        return []

    def _judge(self, run: Run, works: bool, now_s: float) -> list[Effect]:
        """Blames a frame for the failure of a worker that had only this frame, unless workers fail without it too."""
        self._must_look = True
        if not works or not run.frames:
            self._suspects.appendleft(run)
            self._fail(self.problem, now_s)
            return []
        self._deaths[run.frames[0]] += 1
        if self._deaths[run.frames[0]] < DEATHS:
            self._suspects.appendleft(run)
            return []
        del self._deaths[run.frames[0]]
        return self._convict(run, self.problem)

    def _convict(self, run: Run, reason: str) -> list[Effect]:
        """Quarantines a single frame, unless frames of several edges have failed one after the other."""
        ((key, entry),) = run.frames
        culprits = self._culprits.setdefault(key, {})
        culprits[entry.position] = entry.edge  # once, however often the store fails
        if len(culprits) > MAX_CULPRITS and len(set(culprits.values())) > 1:
            return self._pause(key, reason)
        self._number += 1
        self._plans[self._number] = _Plan(run, Lane.SUSPECT, _State.APPLYING, is_verdict=True)
        return [SetFrameAside(self._number, run, reason)]

    def _pause(self, key: str, reason: str) -> list[Effect]:
        self._set_aside.add(key)
        self._answers.pop(key, None)
        self._suspects = deque(run for run in self._suspects if key not in run.through)
        return [Pause(key, reason)]

    def _was_applied(self, plan: _Plan, failed: Mapping[str, QueryFault]) -> list[Effect]:
        assert self._applied is not None, "a plan follows on a look"
        effects: list[Effect] = []
        for key, through in plan.run.through.items():
            if key not in failed:
                self._applied[key] = through
                if not plan.is_verdict:
                    self._culprits.pop(key, None)
        for key, fault in failed.items():
            run = plan.run.of({key})
            if fault.is_state or plan.is_verdict or not run.frames:
                effects += self._pause(key, fault.reason)
            elif len(run.frames) == 1:
                effects += self._convict(run, fault.reason)
            else:
                self._suspects.extendleft(reversed(run.halves()))
        if len(failed) < len(plan.run.through):
            self._recovered()
        self._must_look = True
        return [*effects, Sweep()]

    def _end_silent(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for number, plan in self._plans.items():
            if plan.until_s is not None and plan.until_s <= now_s:
                plan.state, plan.until_s = _State.CANCELLED, None
                effects.append(Cancel(number))
        return effects

    def _cancel_all(self) -> list[Effect]:
        answers = [each.number for each in self._answers.values() if each.number is not None]
        return [Cancel(n) for n in (*(n for n, p in self._plans.items() if p.state is _State.MERGING), *answers)]

    def _fail(self, reason: str, now_s: float) -> None:
        self.problem, self._must_look = reason, True
        self._resume_s = now_s + min(FIRST_DELAY_S * 2**self._failures, MAX_DELAY_S)
        self._failures = min(self._failures + 1, 16)

    def _recovered(self) -> None:
        self._failures, self._resume_s, self.problem, self.is_caught_up = 0, None, "", True


def positions_of(frames: Iterable[Frame]) -> dict[str, list[tuple[int, int]]]:
    """Returns, by query key, the ranges of positions of frames, each (after, through), ascending."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for key, entry in frames:
        of_query = spans.setdefault(key, [])
        if of_query and of_query[-1][1] + 1 == entry.position:
            of_query[-1] = of_query[-1][0], entry.position
        else:
            of_query.append((entry.position - 1, entry.position))
    return spans
