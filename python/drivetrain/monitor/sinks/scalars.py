"""Names the numbers of an event for the tools that draw a curve per name."""

from __future__ import annotations

from ...phases import LABELS
from ..stream import Event


def scalars(event: Event) -> dict[str, float]:
    """Returns the numbers of an event by name; other events than steps and samples of the system have none."""
    if event["type"] == "system":
        return {f"system/{name}": value for name, value in event["values"].items()}
    if event["type"] != "step":
        return {}
    values = {"step/milliseconds": 1e3 * event["wall_s"]}
    for phase in LABELS:
        values[f"phase/{phase}_ms"] = 1e3 * event["phases"][phase]
    for name in ("samples_per_s", "mfu", "hfu"):
        if event.get(name) is not None:
            values[f"throughput/{name}"] = event[name]
    return values
