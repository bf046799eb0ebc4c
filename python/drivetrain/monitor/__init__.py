"""Accounts for the time of training steps; see `Monitor`."""

from .monitor import Monitor
from .sinks import JSONL
from .stragglers import Straggler
from .stream import Sink
from .summary import Summary, read_events, summarize

__all__ = ["JSONL", "Monitor", "Sink", "Straggler", "Summary", "read_events", "summarize"]
