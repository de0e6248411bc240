"""Early answers: decides when a window is answered before all its records have arrived, and how wide its interval is.

The trigger decides when enough records have arrived (Aion, DEBS '20). The estimator stores the arrivals of a query and
estimates the query's windows. The sampling policy decides when edges sample and at which rate. This package has no I/O
and reads no clock.
"""

from center.early.estimator import EarlyAnswerEstimator
from center.early.function_answers import FunctionEstimate, estimate_function, plan_rate
from center.early.observed_arrivals import Delays
from center.early.sampling import (
    RATE_MARGIN,
    RATES_EVERY_MS,
    EdgeSamplingController,
    SamplingPlan,
    SamplingReasonHistory,
    SamplingRequirement,
    describe_reasons,
    is_expensive,
    needed_plan,
    plans_differ,
)
from center.early.window_prediction import GroupPrediction, Prediction
