"""Writes the event stream for Weights & Biases."""

from __future__ import annotations

import importlib
from typing import Any

from ..stream import Event, Sink
from .requirement import require
from .scalars import scalars

_STEP = "drivetrain/step"


class WandB(Sink):
    """Logs scalars to the active W&B run of the script, or else to a run of its own.

    W&B's environment variables apply: WANDB_MODE=offline writes files only, which `wandb sync` uploads later.

    Args:
        project: The project of a run of its own.

    Raises:
        ImportError: The package wandb is missing.
    """

    close_s = 30.0  # uploads what is left

    def __init__(self, project: str) -> None:
        require("wandb", "the sink wandb")
        self.name = f"wandb:{project}"
        self._project = project
        self._run: Any = None
        self._is_own = False

    def open(self) -> None:
        """Begins a run, unless the script has one."""
        wandb: Any = importlib.import_module("wandb")
        self._is_own = wandb.run is None
        # Without console="off", W&B would wrap the output streams of the script.
        settings = wandb.Settings(console="off")
        self._run = wandb.init(project=self._project, settings=settings) if self._is_own else wandb.run
        # The script may log with steps of its own, so that these curves bring theirs.
        self._run.define_metric("drivetrain/*", step_metric=_STEP)

    def write(self, event: Event) -> None:
        """Logs the scalars of a step, and puts other messages into the summary of the run."""
        if values := scalars(event):
            self._run.log({_STEP: event["step"], **{f"drivetrain/{name}": value for name, value in values.items()}})
        elif event["type"] in ("advice", "straggler", "hang"):
            self._run.summary[f"drivetrain/{event['type']}/{event['phase']}"] = event["text"]

    def close(self) -> None:
        """Ends the run, if it is its own."""
        if self._is_own:
            self._run.finish()
