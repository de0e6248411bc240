"""Builds synopses over any Spark DataFrame (divide, compute, merge) and answers questions about them (Condor).

This package is for users of Spark. The center's services do not call it. Its tasks run in Spark's Python workers, so no
module here may import SQLAlchemy, FastAPI or gRPC.
"""

from __future__ import annotations

from center.batch.builder import build, plan
from center.batch.evaluator import evaluate
from center.batch.sql_functions import register_sql
from center.batch.strategy import Strategy

__all__ = ["Strategy", "build", "evaluate", "plan", "register_sql"]
