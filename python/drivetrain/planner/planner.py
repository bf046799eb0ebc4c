"""`drivetrain.plan`: traces a training step without computing it, and predicts its memory and time on a device."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from ..memory import bytes_of
from .options import Options

if TYPE_CHECKING:
    from .result import Plan
    from .trace import StepTrace


def plan(
    model: nn.Module,
    step_fn: Callable[..., object],
    *,
    device: str = "h100",
    world_size: int = 1,
    per_host: int = 8,
    batch: int | None = None,
    length: int | None = None,
    optimizer: str | None = None,
    state_bits: int | None = None,
    master_bits: int | None = None,
    budget: int | str | None = None,
    accumulate: int = 1,
    shard: str | None = None,
    release: bool = False,
    ddp: str = "drivetrain",
    bucket_mib: float = 25.0,
    expandable: bool = False,
    calibrate: bool | float = False,
    devices: str | os.PathLike[str] | None = None,
) -> Plan:
    """Predicts the memory and the time of a training step on a device, without weights and without that device.

    Traces two steps with tensors that have shapes and no values, and replays their allocations under the rules of
    torch's allocator. Weights, gradients and optimizer states stay as they are.

    ::

        with torch.device("meta"):
            model = Transformer()
        plan = drivetrain.plan(model, step, device="h100", world_size=64, optimizer="AdamW")
        print(plan)

    Args:
        model: The model, on any device. On "meta" it takes no memory.
        step_fn: Runs forward, loss and backward of a training step of one rank. It may step an optimizer. It may take
            the arguments `batch` and `length`, which the questions about the largest ones need. Do not wrap the model
            into DistributedDataParallel for it.
        device: A key of the device table, such as "a100", "h100", "h200", "l4", "rtx4090" or "cpu".
        world_size: Number of ranks, one device each.
        per_host: Devices of a host.
        batch: Samples of a micro-batch, for samples per second; given to step_fn if it takes it.
        length: Length of a sequence; given to step_fn if it takes it.
        optimizer: A class of drivetrain.optim whose states and step count, for a step_fn that does not step.
        state_bits: Format of the optimizer's states in place of the traced ones: 32, 16, 8 or 4.
        master_bits: Format of master weights of 16-bit parameters: 32 or 24.
        budget: The most bytes of activations kept for backward, such as "20GiB" or "50%" of the device's memory.
        accumulate: Micro-batches of a step.
        shard: "optimizer" divides optimizer states among the ranks, "gradients" gradients as well.
        release: Backward steps each parameter and frees its gradient, as `step_in_backward` does.
        ddp: "drivetrain" or "torch": whose DistributedDataParallel runs with more than one rank.
        bucket_mib: MiB of a bucket.
        expandable: The CUDA allocator uses expandable segments.
        calibrate: For device "cpu": measures the step's operations on this machine for up to 30 seconds, or as many as
            given. A cache keeps the measurements.
        devices: A TOML file with more devices, in the format of the built-in table.

    Returns:
        The plan. Printing it shows the tables; `plot` draws the memory over the step.

    Raises:
        TypeError: `model` is no module, `step_fn` no function, or `optimizer` no string.
        ValueError: An argument is out of range, the device is unknown, or no plan meets the budget.
        PlanError: The step depends on values, or runs no backward.
    """
    from .devices import device_of
    from .result import Plan

    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    if not callable(step_fn):
        raise TypeError(f"step_fn is {step_fn!r}, expected a function that runs a training step")
    for name, size in (("batch", batch), ("length", length)):
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{name} is {size!r}, expected a whole number of 1 or more, or None")
    if optimizer is not None and not isinstance(optimizer, str):
        raise TypeError(f"optimizer is {optimizer!r}, expected the name of a class, such as 'AdamW'")
    found = device_of(device, devices)
    options = Options(
        world_size=world_size,
        per_host=per_host,
        ddp=ddp,
        bucket_mib=bucket_mib,
        shard=shard,
        accumulate=accumulate,
        budget=None if budget is None else bytes_of(budget, found.memory_bytes),
        state_bits=state_bits,
        master_bits=master_bits,
        release=release,
        expandable=expandable,
    )
    if not isinstance(calibrate, int | float) or not calibrate >= 0:
        raise ValueError(f"calibrate is {calibrate!r}, expected True, False or a number of seconds")
    if calibrate and found.kind != "cpu":
        raise ValueError(f"calibrate measures this machine's CPU, and device is {device!r}: leave it out")

    def trace_for(kind: str, other_batch: int | None, other_length: int | None) -> StepTrace:
        from .tracer import trace_steps

        taken, sizes = inspect.signature(step_fn).parameters, {}
        for name, value, first in (("batch", other_batch, batch), ("length", other_length, length)):
            if name not in taken:
                if value != first:
                    raise ValueError(
                        f"step_fn takes no {name}, so that no other {name} can be planned: def step({name})"
                    )
            elif value is not None:
                sizes[name] = value
            elif taken[name].default is inspect.Parameter.empty:
                raise ValueError(f"{name} is None, and step_fn takes it: expected a whole number")
        return trace_steps(model, lambda: step_fn(**sizes), device_kind=kind)

    trace = trace_for(found.kind, batch, length)
    how = {"batch": batch, "length": length, "optimizer": optimizer, "retrace": trace_for, "devices": devices}
    made = Plan.of(trace, found, options, **how)  # type: ignore[arg-type]
    if not calibrate:
        return made
    return made.calibrated(30.0 if calibrate is True else float(calibrate))
