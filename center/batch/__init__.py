"""Synopses over any Spark DataFrame: divide, compute, merge; and questions to them (Condor, VLDB 2021)."""

from __future__ import annotations

from center.batch.builder import build, plan
from center.batch.evaluator import evaluate, latest_revisions
from center.batch.sql_functions import register_sql
from center.batch.strategy import Strategy

__all__ = ["Strategy", "build", "evaluate", "latest_revisions", "plan", "register_sql"]
