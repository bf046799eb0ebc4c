"""Plans training runs: whether a model fits, how long a step takes, and what a run costs."""

from .planner import plan

__all__ = ["plan"]
