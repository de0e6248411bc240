"""Early trigger: decides when a window can be answered from a sample and without its stragglers (Aion, DEBS '20).

`center.estimation` feeds it arrivals and asks for decisions; `center.serving` and `center.job` use it to estimate
functions of samples and to plan their rates. Pure: no I/O, no clock; knows nothing of edges, queries or the ledger.
"""

from center.early_trigger.batch import TriggerBatch
from center.early_trigger.estimate import WindowModel, WindowSample
from center.early_trigger.function_estimate import FunctionEstimate, estimate_function, plan_rate
from center.early_trigger.sample_size import finite_population_size, mean_size
from center.early_trigger.source_remap import SourceRemap
from center.early_trigger.stragglers import MIN_EVENTS, Stragglers, StragglersByTrigger
from center.early_trigger.trigger import NEGLIGIBLE_FAILURES, AnswerNow, Decision, EarlyTrigger, TriggerPolicy, Wait

__all__ = [
    "MIN_EVENTS",
    "NEGLIGIBLE_FAILURES",
    "AnswerNow",
    "Decision",
    "EarlyTrigger",
    "FunctionEstimate",
    "SourceRemap",
    "Stragglers",
    "StragglersByTrigger",
    "TriggerBatch",
    "TriggerPolicy",
    "Wait",
    "WindowModel",
    "WindowSample",
    "estimate_function",
    "finite_population_size",
    "mean_size",
    "plan_rate",
]
