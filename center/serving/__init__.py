"""Turns stored answers into output for readers: JSON, tables, and answers to questions about windows.

`center.api` and `center.job` call it. It is pure, except `StoredWindows`, which reads the result store. It has no HTTP.
"""

from center.serving.computed import MAX_COMPUTED, ComputedValue, RowSelection
from center.serving.evaluator import AnsweredWindows, Evaluator, WindowAnswer
from center.serving.explanation import EdgeStatement, Sides, edge_statements, explain_value, value_of_group
from center.serving.function_values import SEED, function_confidence
from center.serving.measures import MAX_ASKED, NO_QUESTIONS, MeasureQuestions, require_possible
from center.serving.question_lines import WindowQuestion, parse_json
from center.serving.render import Answer, evaluated, render
from center.serving.rollup import EVERY_ACCEPTED, Intervals, roll_up
from center.serving.stored_windows import StoredWindows
from center.serving.synopsis_cache import SynopsisCache

__all__ = [
    "EVERY_ACCEPTED",
    "MAX_ASKED",
    "MAX_COMPUTED",
    "NO_QUESTIONS",
    "SEED",
    "Answer",
    "AnsweredWindows",
    "ComputedValue",
    "EdgeStatement",
    "Evaluator",
    "Intervals",
    "MeasureQuestions",
    "RowSelection",
    "Sides",
    "StoredWindows",
    "SynopsisCache",
    "WindowAnswer",
    "WindowQuestion",
    "edge_statements",
    "evaluated",
    "explain_value",
    "function_confidence",
    "parse_json",
    "render",
    "require_possible",
    "roll_up",
    "value_of_group",
]
