"""Evaluates rules on stored answers, to show which alerts the rules would have raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from center.catalog import Catalog
from center.results import AnswerReader
from center.sinks.alert_rules import AlertBook, AlertRule, Transition
from center.sinks.runner import read_query, sink_answer
from edgewater.answers.work import WorkEnded
from edgewater.model.errors import Overspent

PAGE = 100
MAX_TRANSITIONS = 100
"""The most transitions of one rule that a report lists."""


@dataclass(slots=True)
class RuleReport:
    """The alerts that a rule would have raised.

    Attributes:
        problem: why the rule could not be evaluated; empty if it was evaluated.
        fired: number of times that an alert would have begun to fire.
        transitions: the first `MAX_TRANSITIONS` transitions.
    """

    rule: AlertRule
    problem: str = ""
    fired: int = 0
    transitions: list[Transition] = field(default_factory=list)


@dataclass(slots=True)
class CheckReport:
    """The alerts that a set of rules would have raised.

    Attributes:
        answers: number of evaluated answers. Only the newest stored revision of a window is evaluated.
        is_whole: whether all answers were evaluated. If false, the last answers were not evaluated.
    """

    rules: list[RuleReport]
    answers: int = 0
    is_whole: bool = True


def check_rules(
    rules: Sequence[AlertRule],
    catalog: Catalog,
    results: AnswerReader,
    *,
    start_ms: int | None,
    now_ms: Callable[[], int],
) -> CheckReport:
    """Evaluates rules on stored answers, as if each answer had just been given. If the work of the request ends, the
    last answers are not evaluated.

    Args:
        start_ms: the evaluation begins with the first answer to a window that starts at this time or later. If None, it
            begins with the first stored answer.

    Raises:
        StorageError: a store cannot be read.
    """
    names = {rule.query for rule in rules}
    queries = {q.ref: read_query(q, catalog) for q in catalog.queries.all() if q.ref.name in names}
    book, reports = AlertBook(rules), {rule.name: RuleReport(rule) for rule in rules}
    report = CheckReport(list(reports.values()))
    book.check(query.of_sink for query in queries.values())

    def note(transitions: Sequence[Transition]) -> None:
        for transition in transitions:
            of_rule = reports[transition.rule.name]
            of_rule.fired += transition.status == "firing"
            if len(of_rule.transitions) < MAX_TRANSITIONS:
                of_rule.transitions.append(transition)

    last = 0 if start_ms is None else (results.first_answer_from(start_ms) or results.last_answer_id() + 1) - 1
    try:
        while records := results.changes_after(last, PAGE).records:
            last = records[-1].answer_id
            for record in records:
                if record.query not in queries:
                    continue
                query = queries[record.query] = queries[record.query].typed(catalog)
                note(book.tick(record.answered_at_ms))
                answer = sink_answer(record, query)
                note(book.answer(answer, query.registered.spec.measures, record.answered_at_ms))
                note(book.tick(record.answered_at_ms))
                report.answers += 1
    except WorkEnded as end:
        if not isinstance(end.error, Overspent):
            raise
        report.is_whole = False
    if report.is_whole:
        note(book.tick(now_ms()))
    for name, problem in book.problems.items():
        reports[name].problem = problem
    return report
