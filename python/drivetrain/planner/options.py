"""Holds what a plan assumes about a run: ranks, formats, budgets and accumulation."""

from dataclasses import dataclass

_CHOICES = {
    "shard": (None, "optimizer", "gradients"),
    "ddp": ("drivetrain", "torch"),
    "master_bits": (None, 32, 24),
}


@dataclass(frozen=True)
class Options:
    """The assumptions of a plan besides the step, which `drivetrain.plan` describes. The budget is in bytes."""

    world_size: int = 1
    per_host: int = 8
    ddp: str = "drivetrain"
    bucket_mib: float = 25.0
    shard: str | None = None
    accumulate: int = 1
    budget: int | None = None
    state_bits: int | None = None
    master_bits: int | None = None
    release: bool = False
    expandable: bool = False

    def __post_init__(self) -> None:
        for name in ("world_size", "per_host", "accumulate"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected a whole number of 1 or more")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(map(repr, known))}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget is {self.budget} bytes, expected more than 0")
        if not (isinstance(self.bucket_mib, int | float) and self.bucket_mib > 0):
            raise ValueError(f"bucket_mib is {self.bucket_mib!r}, expected a number above 0")
        if self.release and self.accumulate > 1:
            raise ValueError("release=True frees gradients in every backward, so accumulate must be 1")

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mib * 2**20)

    @property
    def keeps_gradients(self) -> bool:
        """Returns True if gradients lie in a buffer that outlives the step."""
        return not self.release and (self.accumulate > 1 or (self.world_size > 1 and self.ddp == "drivetrain"))


def formatted(num_bytes: float) -> str:
    """Returns bytes in the largest fitting binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def duration(seconds: float) -> str:
    """Returns a time in hours, or in a smaller unit where hours would round to little."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:,.2f} hours"
