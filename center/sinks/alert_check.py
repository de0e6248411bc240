"""Evaluates rules on stored answers, to show which alerts the rules would have raised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue, with_config
from typing_extensions import TypedDict

from center.catalog import Catalog
from center.results import AnswerReader
from center.sinks.alert_rules import AlertBook, AlertRule, Transition
from center.sinks.alerts import stated
from center.sinks.runner import read_query, sink_answer
from edgewater.answers.work import WorkEnded
from edgewater.base.errors import Overspent
from edgewater.base.timestamps import rfc3339

PAGE = 100  # limit: memory of a check
MAX_CHANGES = 100
"""The most changes of one rule that a check lists. This limit protects the memory of the API."""


@with_config(use_attribute_docstrings=True)
class CheckedAlert(TypedDict):
    """An alert that would have begun to fire, or would have been resolved."""

    status: str
    at: str
    """When the answer was given."""
    labels: dict[str, str]
    details: Mapping[str, JsonValue]


@with_config(use_attribute_docstrings=True)
class CheckedRule(TypedDict):
    """A rule, and what it would have done."""

    rule: str
    query: str
    condition: str
    problem: str | None
    """Why it cannot be evaluated."""
    fired: int
    """How often an alert would have begun to fire."""
    changes: list[CheckedAlert]
    """The first 100."""


@with_config(use_attribute_docstrings=True)
class RuleCheck(TypedDict):
    """What a set of rules would have done."""

    rules: list[CheckedRule]
    answers: int
    """Answers that were evaluated: the newest stored revision of each window."""
    is_whole: bool
    """Whether these are all. Otherwise later ones were left out."""


def check_rules(
    rules: Sequence[AlertRule],
    catalog: Catalog,
    results: AnswerReader,
    *,
    start_ms: int | None,
    now_ms: Callable[[], int],
) -> RuleCheck:
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
    book = AlertBook(rules)
    checked: dict[str, CheckedRule] = {
        r.name: {"rule": r.name, "query": r.query, "condition": r.text, "problem": None, "fired": 0, "changes": []}
        for r in rules
    }
    report: RuleCheck = {"rules": list(checked.values()), "answers": 0, "is_whole": True}
    book.check(queries.values())

    def note(transitions: Sequence[Transition]) -> None:
        for transition in transitions:
            of_rule, status = checked[transition.rule.name], transition.status
            of_rule["fired"] += status == "firing"
            if len(of_rule["changes"]) < MAX_CHANGES:
                alert = stated(transition.rule, transition.alert, status)
                at, labels, details = rfc3339(transition.at_ms), alert["labels"], alert["details"]
                of_rule["changes"].append({"status": status, "at": at, "labels": labels, "details": details})

    last = 0 if start_ms is None else (results.first_answer_from(start_ms) or results.last_answer_id() + 1) - 1
    try:
        while records := results.changes_after(last, PAGE).records:
            last = records[-1].answer_id
            for record in records:
                if record.query not in queries:
                    continue
                query = queries[record.query]
                if not query.is_typed:
                    query = queries[record.query] = read_query(query, catalog, has_answers=True)
                note(book.tick(record.answered_at_ms))
                answer = sink_answer(record, query)
                note(book.answer(answer, query.spec.measures, record.answered_at_ms))
                note(book.tick(record.answered_at_ms))
                report["answers"] += 1
    except WorkEnded as end:
        if not isinstance(end.error, Overspent):
            raise
        report["is_whole"] = False
    if report["is_whole"]:
        note(book.tick(now_ms()))
    for name, problem in book.problems.items():
        checked[name]["problem"] = problem
    return report
