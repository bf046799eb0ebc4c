"""Holds what one run of a script's first steps has shown, for the processes of `drivetrain try`."""

from dataclasses import dataclass, field

# The norm of a tensor, and its product with random signs. The difference of two products is about the norm of the
# difference of the tensors, whatever their values are.
Print = tuple[float, float]

# A module's arguments or results by name, and the prints of their tensors.
ModuleCall = tuple[str, list[Print]]


@dataclass(frozen=True)
class Variant:
    """A way to run the script. Torch's has no `ddp`."""

    name: str
    ddp: dict[str, object] | None = None  # defaults of DistributedDataParallel
    optim: bool = False  # torch's optimizers are replaced, too
    formats: dict[str, int] = field(default_factory=dict)  # state_bits and master_bits of every optimizer
    budget: str = ""  # of the activations of every model

    @property
    def has_same_gradients(self) -> bool:
        """True if `.grad` before an optimizer's step must be torch's: no optimizer here unscales or clips by itself."""
        return not self.optim and not (self.ddp or {}).get("shard")


@dataclass
class Step:
    """One call of an optimizer's `step`."""

    losses: list[float] = field(default_factory=list)  # of the backward passes since the step before
    seconds: float = 0.0  # since the step before, without the work of the recorder
    gradients: dict[str, Print] = field(default_factory=dict)  # before the step, by parameter
    parameters: dict[str, Print] = field(default_factory=dict)  # after the step
    calls: list[ModuleCall] = field(default_factory=list)  # in its forward passes, if they were asked for


@dataclass
class RunRecord:
    """One run of the script on one rank."""

    steps: list[Step] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)  # seconds of a step by phase, if no prints were taken
    peak_bytes: int = 0  # of the device, or resident on the CPU
    network_bytes: int = 0  # of this host, through its interfaces
    plain_bytes: int = 0  # of activations that the models would keep for backward without a budget
    kept_bytes: int = 0  # of activations that they keep at most
    resolution: float = 1e-7  # relative rounding of the coarsest dtype that parameters or autocast have
    warnings: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)  # what the script would have written and started
    built: list[str] = field(default_factory=list)  # models and optimizers of drivetrain
    error: str = ""  # why there are fewer steps than asked for
