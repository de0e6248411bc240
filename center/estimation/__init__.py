"""Early-answer estimator: a query's arrivals per edge and group, and the estimate of each window from them.

The ledger (`center.ledger.early_answers`) feeds it edges' arrival reports and asks when a window can be answered and
with which interval. Pure: no I/O, no clock; its state is a log of changes in JSON that the ledger stores.
"""

from center.estimation.estimator import Delays, EarlyAnswerEstimator
from center.estimation.prediction import GroupPrediction, Prediction

__all__ = ["Delays", "EarlyAnswerEstimator", "GroupPrediction", "Prediction"]
