"""Scheduling: many queries on too little CPU. Pure: no clock, no threads.

`Scheduler` orders the queries of one worker by a `Policy`: Klink's least slack (chapter 3 of the thesis "Klink and
Aion", as corrected) or one of the baselines that it is measured against. Slack needs an estimate of the next sweeping
watermark's ingestion (`IngestionHistory`) and measured costs (`CostEstimate`): see `docs/explanation/scheduling.md`.
"""

from edgewater.scheduling.costs import CostEstimate, Operator
from edgewater.scheduling.ingestion import DelayInterval, IngestionHistory, normal_interval
from edgewater.scheduling.memory import QueueLimits
from edgewater.scheduling.policies import PATIENCE, POLICIES, LeastSlack, Policy, make_policy
from edgewater.scheduling.queries import Item, QueryProfile, ScheduledQuery
from edgewater.scheduling.scheduler import Scheduler, Turn

__all__ = [
    "PATIENCE",
    "POLICIES",
    "CostEstimate",
    "DelayInterval",
    "IngestionHistory",
    "Item",
    "LeastSlack",
    "Operator",
    "Policy",
    "QueryProfile",
    "QueueLimits",
    "ScheduledQuery",
    "Scheduler",
    "Turn",
    "make_policy",
    "normal_interval",
]
