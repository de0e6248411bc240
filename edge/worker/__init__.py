"""Decides which query processes its queued records next, and how many, on an edge that is short of CPU."""

from edge.worker.tuning import TUNING, Tuning
from edge.worker.worker import OFF, QUEUE_SHARE, QueryBacklog, Worker

__all__ = ["OFF", "QUEUE_SHARE", "TUNING", "QueryBacklog", "Tuning", "Worker"]
