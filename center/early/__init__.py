"""Early answers: when a window is answered before all its records have arrived, and how wide its interval is.

The trigger decides when a sample without its stragglers suffices (Aion, DEBS '20). The estimator keeps the arrivals of
a query and estimates its windows. The sampling policy says when edges sample and at which rate. Pure: no I/O, no clock.
"""

from center.early.estimate import WindowModel, WindowSample
from center.early.estimator import Delays, EarlyAnswerEstimator
from center.early.function_answers import FunctionEstimate, estimate_function, plan_rate
from center.early.prediction import GroupPrediction, Prediction
from center.early.sample_size import finite_population_size, mean_size
from center.early.sampling_policy import (
    RATE_MARGIN,
    RATES_EVERY_MS,
    EdgeSamplingController,
    SamplingRequirement,
    is_expensive,
    needed_rate,
    rates_differ,
)
from center.early.sampling_reasons import SamplingReasonHistory, describe_reasons
from center.early.source_remap import SourceRemap
from center.early.stragglers import MIN_EVENTS, Stragglers, StragglersByTrigger
from center.early.trigger import NEGLIGIBLE_FAILURES, AnswerNow, Decision, EarlyTrigger, TriggerPolicy, Wait
from center.early.trigger_batch import TriggerBatch

__all__ = [
    "MIN_EVENTS",
    "NEGLIGIBLE_FAILURES",
    "RATES_EVERY_MS",
    "RATE_MARGIN",
    "AnswerNow",
    "Decision",
    "Delays",
    "EarlyAnswerEstimator",
    "EarlyTrigger",
    "EdgeSamplingController",
    "FunctionEstimate",
    "GroupPrediction",
    "Prediction",
    "SamplingReasonHistory",
    "SamplingRequirement",
    "SourceRemap",
    "Stragglers",
    "StragglersByTrigger",
    "TriggerBatch",
    "TriggerPolicy",
    "Wait",
    "WindowModel",
    "WindowSample",
    "describe_reasons",
    "estimate_function",
    "finite_population_size",
    "is_expensive",
    "mean_size",
    "needed_rate",
    "plan_rate",
    "rates_differ",
]
