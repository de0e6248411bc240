"""Tests of the contract of sinks, for packages that provide kinds of sinks. Each case of `CASES` is a test.

@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_sink_keeps_the_contract(case):
    case(MySubject())
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol, cast

import pyarrow as pa

from center.sinks.base import Sink, SinkAnswer, SinkContext, SinkMemory, SinkQuery
from edgewater.answers import Facts, Phase
from edgewater.answers.statement import Contract, Statement
from edgewater.base.errors import StorageError
from edgewater.model.json_types import Document, as_document
from edgewater.model.own_columns import with_own_columns
from edgewater.model.query import QuerySpec
from edgewater.model.replies import Members
from edgewater.model.table_texts import without_zone
from edgewater.wire import QueryRef

HOUR = 3_600_000  # format: a unit of time
DAY = 24 * HOUR
MAX_ENDS = 30
"""The approximate number of writes that one case interrupts."""
QUERY = QuerySpec.from_mapping(
    {"name": "kit", "from": "s", "group_by": ["k"], "measures": {"n": "count()"}, "window": {"tumbling": "1h"}}
)
REF, OTHER = QueryRef("kit", 3), QueryRef("other", 1)
_COLUMNS = pa.schema([("k", pa.string()), ("n", pa.int64()), ("n_lower", pa.int64()), ("n_upper", pa.int64())])
Contents = Mapping[int, Mapping[str | None, int]]
"""The value of `n` per group, per start of a window in ms."""


class Subject(Protocol):
    """One system, and the kind of sinks that writes to it. Each case gets a new subject.

    Attributes:
        only_final: whether the kind takes only final answers and their corrections.
    """

    only_final: bool

    def sink(self, context: SinkContext) -> Sink:
        """Returns a sink that writes to the system."""

    def contents(self) -> Contents:
        """Returns the answers of the query `REF` that a reader of the system sees."""


def answer(
    answer_id: int,
    start_ms: int,
    groups: Mapping[str | None, int],
    revision: int = 1,
    removed: Sequence[str] = (),
    query: QueryRef = REF,
) -> SinkAnswer:
    """Returns a final answer with the value `n` per group."""
    end_ms, counts = start_ms + HOUR, list(groups.values())
    columns: list[Sequence[Any]] = [list(groups), counts, counts, counts]
    stated = Statement(Facts(1, 1, 1.0), {"withheld": {}}, Contract({}))
    statement: Document = {
        "query": query.name, "revision": revision, "phase": "final", "quality": as_document(stated.quality()),
        "contract": as_document(stated.contract.to_json()),
    }  # fmt: skip
    times_ms = {"window_start": start_ms, "window_end": end_ms, "given_at": end_ms}
    rows = pa.table([pa.array(c, f.type) for c, f in zip(columns, _COLUMNS, strict=True)], schema=_COLUMNS)
    table = without_zone(with_own_columns(rows, cast(Members, statement), times_ms))
    return SinkAnswer(
        query, start_ms, end_ms, revision, Phase.FINAL, end_ms, answer_id, table, statement, ("k",),
        lambda: [{"k": key} for key in removed], stated=stated,
    )  # fmt: skip


SCHEMA = answer(0, 0, {}).rows.schema


class _Center:
    """A center that runs the sink. A test may kill it."""

    def __init__(self, subject: Subject, center: int = 1, name: str = "kit", running: Sequence[str] = ()) -> None:
        self.subject, self.memory, self.center, self.name, self.epoch = subject, SinkMemory(), center, name, 0
        self.running = running
        self.open()

    def open(self) -> None:
        self.epoch += 1
        memory, center = self.memory, self.center
        context = SinkContext(self.name, self.epoch, memory, center=center, running=lambda: self.running)
        self.sink = self.subject.sink(context)
        try:
            self.position = self.sink.open([SinkQuery(ref, QUERY, SCHEMA) for ref in (REF, OTHER)]).get(REF)
        except BaseException:
            self.sink.close()
            raise

    def restart(self) -> None:
        self.sink.close()
        self.open()

    def write(self, *answers: SinkAnswer) -> None:
        self.sink.write(answers, {each.query: each.answer_id for each in answers})


def _reason_of(opens: Callable[[], object]) -> str:
    try:
        opens()
    except StorageError as exc:
        return exc.message
    raise AssertionError("the sink was opened")


class _Ended(BaseException):
    """Ends a write like a kill. No handler of errors catches it."""


def _write_ended_at(center: _Center, last: float, page: SinkAnswer) -> int:
    """Writes a page, and ends the write after `last` lines of the sink's module. Returns the number of lines that have
    run.
    """
    module, lines = inspect.getsourcefile(type(center.sink)), 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != module:
            return None
        lines += event == "line"
        if lines > last:
            raise _Ended
        return trace

    before = sys.gettrace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the simulated end of the process leaves a file open
        sys.settrace(trace)
        try:
            center.write(page)
        except _Ended:
            pass
        finally:
            sys.settrace(before)
    return lines


def each_answer_arrives_with_all_groups(subject: Subject) -> None:
    """Writes groups that are null, an empty text, and texts with quotes, line breaks and NUL, and reads them back."""
    center = _Center(subject)
    groups = {"a": 1, None: 2, "": 3, 'it\'s "x",\ny': 4}
    center.write(answer(1, 0, groups), answer(2, DAY, {"b": 1 << 53}))
    center.write(answer(3, 2 * DAY, {"z\0": 1}))
    center.sink.close()
    contents = subject.contents()
    assert contents[0] == groups and contents[DAY] == {"b": 1 << 53}
    (odd,) = contents[2 * DAY].values()
    assert odd == 1


def each_query_has_a_position_of_its_own(subject: Subject) -> None:
    """Checks that a new system has no position, and that a sink returns the last answer of each query."""
    center = _Center(subject)
    assert [center.position] == [None]
    center.write(answer(4, 0, {"a": 1}))
    center.restart()
    assert center.position == 4
    center.write(answer(5, 0, {"a": 9}, query=OTHER), answer(7, HOUR, {"a": 2}))
    center.restart()
    assert center.position == 7
    center.write(answer(9, DAY, {"a": 9}, query=OTHER))
    center.restart()
    assert center.position == 7
    assert center.sink.open([SinkQuery(OTHER, QUERY, SCHEMA)]) == {OTHER: 9}
    assert subject.contents() == {0: {"a": 1}, HOUR: {"a": 2}}
    center.sink.close()


def another_center_is_refused_and_changes_nothing(subject: Subject) -> None:
    """Opens the answers of one center by another one, which has the same queries."""
    center = _Center(subject)
    center.write(answer(4, 0, {"a": 1}))
    assert REF.name in _reason_of(lambda: _Center(subject, center=2))
    center.write(answer(5, HOUR, {"a": 2}))
    center.sink.close()
    assert subject.contents() == {0: {"a": 1}, HOUR: {"a": 2}}


def a_sink_with_another_name_goes_on_unless_both_run(subject: Subject) -> None:
    """Opens the answers of one sink by another one of the same center."""
    center = _Center(subject)
    center.write(answer(4, 0, {"a": 1}))
    assert "kit" in _reason_of(lambda: _Center(subject, name="renamed", running=["kit"]))
    center.sink.close()
    renamed = _Center(subject, name="renamed")
    assert renamed.position == 4
    renamed.write(answer(5, HOUR, {"a": 2}))
    renamed.restart()
    assert renamed.position == 5
    renamed.sink.close()
    assert subject.contents() == {0: {"a": 1}, HOUR: {"a": 2}}


def a_page_that_comes_again_changes_nothing(subject: Subject) -> None:
    """Writes pages again, as after a kill between the write and its confirmation, also divided into other pages."""
    center = _Center(subject)
    pages = [
        answer(1, 0, {"a": 1}),
        answer(2, DAY, {"a": 2}),
        answer(3, HOUR, {"a": 3}),
        answer(4, DAY + HOUR, {"b": 4}),
    ]
    center.write(*pages[:2])
    center.restart()
    center.write(*pages[:3])
    center.restart()
    center.write(*pages)
    center.restart()
    center.write(*pages[1:])
    center.sink.close()
    assert subject.contents() == {0: {"a": 1}, DAY: {"a": 2}, HOUR: {"a": 3}, DAY + HOUR: {"b": 4}}


def the_newest_revision_replaces_a_window_and_an_older_one_does_not(subject: Subject) -> None:
    """Checks that groups that the newest revision lacks are removed."""
    if subject.only_final:
        return
    center = _Center(subject)
    center.write(answer(1, 0, {"a": 1, "b": 2}), answer(2, HOUR, {"a": 9}))
    center.write(answer(3, 0, {"a": 5, "c": 1}, revision=2, removed=["b"]))
    assert subject.contents() == {0: {"a": 5, "c": 1}, HOUR: {"a": 9}}
    center.restart()
    center.write(answer(3, 0, {"a": 5, "c": 1}, revision=2, removed=["b"]))
    assert subject.contents() == {0: {"a": 5, "c": 1}, HOUR: {"a": 9}}
    center.sink.close()


def an_answer_without_rows_is_no_row(subject: Subject) -> None:
    """Checks that an answer without rows removes the rows of the earlier revision."""
    center = _Center(subject)
    center.write(answer(1, 0, {}), answer(2, HOUR, {"a": 1}))
    assert subject.contents() == {HOUR: {"a": 1}}
    if not subject.only_final:
        center.write(answer(3, HOUR, {}, revision=2, removed=["a"]))
        assert subject.contents() == {}
    center.sink.close()


def a_write_that_ends_anywhere_loses_and_doubles_nothing(subject: Subject) -> None:
    """Ends a write after 0, 1, 2, … lines of the sink's module. A new sink must continue at the position of
    the system.
    """
    center = _Center(subject)
    lines = _write_ended_at(center, math.inf, answer(1, 0, {"a": 0}))
    contents = {0: {"a": 0}}
    for last in range(0, lines, 1 + lines // MAX_ENDS):
        start_ms, answer_id = len(contents) * HOUR, len(contents) + 1
        page, contents[start_ms] = answer(answer_id, start_ms, {"a": last}), {"a": last}
        _write_ended_at(center, last, page)
        center.restart()
        if center.position is None or center.position < answer_id:
            center.write(page)
    center.sink.close()
    assert len(contents) > 1 and subject.contents() == contents


def many_answers_fit_into_a_page(subject: Subject) -> None:
    """Writes a page of 500 answers, which is the maximum."""
    center = _Center(subject)
    answers = [answer(n + 1, n * HOUR, {f"g{n % 7}": n, "x": 1}) for n in range(500)]
    center.write(*answers)
    center.sink.close()
    assert subject.contents() == {n * HOUR: {f"g{n % 7}": n, "x": 1} for n in range(500)}


CASES: tuple[Callable[[Subject], None], ...] = (
    each_answer_arrives_with_all_groups,
    each_query_has_a_position_of_its_own,
    another_center_is_refused_and_changes_nothing,
    a_sink_with_another_name_goes_on_unless_both_run,
    a_page_that_comes_again_changes_nothing,
    the_newest_revision_replaces_a_window_and_an_older_one_does_not,
    an_answer_without_rows_is_no_row,
    a_write_that_ends_anywhere_loses_and_doubles_nothing,
    many_answers_fit_into_a_page,
)
