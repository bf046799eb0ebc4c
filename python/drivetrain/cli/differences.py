"""Lists the intended differences from torch for `drivetrain doctor --differences` and docs/limitations.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class IntendedDifference:
    """Describes one intended difference.

    Attributes:
        topic: The object or behavior that differs.
        torch: The behavior of torch's class.
        drivetrain: The behavior of drivetrain's class.
        reason: The reason for the difference, and the argument that restores torch's behavior if there is one.
    """

    topic: str
    torch: str
    drivetrain: str
    reason: str


DIFFERENCES: Sequence[IntendedDifference] = (
    IntendedDifference(
        "Number and size of buckets",
        "Caps of 1 MiB and 25 MiB.",
        "Planned from measured times, after four steps on the CPU and nine on CUDA. With a communication hook, "
        "torch's.",
        "Less communication stays exposed. `bucket_cap_mb=25` keeps torch's sizes.",
    ),
    IntendedDifference(
        "Memory of `.grad`",
        "Copies of the buckets, or views with `gradient_as_bucket_view=True`.",
        "Views of one flat gradient buffer, which exists from construction on. A tensor that a script assigns and "
        "keeps stays `.grad`.",
        "No second copy of the gradients exists. `zero_grad()` therefore frees no memory.",
    ),
    IntendedDifference(
        "Tensors kept over a `.grad`",
        "Keep their values, except with `gradient_as_bucket_view=True`.",
        "Keep their values: they get their own memory before the next write. Arrays from `.numpy()` do not.",
        "A NumPy array holds no reference that the buffer could see.",
    ),
    IntendedDifference(
        "`.grad.data = values` and `.grad.set_(values)` with `gradient_as_bucket_view=True`",
        "The next backward ignores the new memory, and `.grad` may keep this rank's own gradient.",
        "The next backward adds to the values, as without a wrapper.",
        "torch's reducer writes into its bucket, which is no longer what `.grad` shows.",
    ),
    IntendedDifference(
        "`.grad` before a synchronized backward has ended: hooks of `AccumulateGrad`, steps between `backward()` calls "
        "on parts of a forward's outputs",
        "This rank's gradient, without `gradient_as_bucket_view=True`.",
        "This rank's gradient divided by the number of ranks, or already the mean, whichever the moment finds.",
        "Gradients are reduced where they lie: this rank's own would need a second copy. Read and step after the last "
        "backward, or use `Tensor.register_hook`, which gets this rank's gradient.",
    ),
    IntendedDifference(
        "Second backward after a forward or after several; forward under `no_sync()` and backward outside",
        "Each rank keeps its own gradients.",
        "The gradients are reduced when the backward pass ends. All ranks raise if one rank alone does this.",
        "Replicas would diverge without an error.",
    ),
    IntendedDifference(
        "Hook that takes a gradient before its reduction, or changes its parameter to another value on each rank",
        "The optimizer uses local gradients.",
        "An error names the parameter.",
        "Replicas would diverge without an error.",
    ),
    IntendedDifference(
        "Parameter that is unfrozen after wrapping",
        "Each rank keeps its own gradient.",
        "The same, with a warning that names the parameter.",
        "Replicas diverge: wrap the module again.",
    ),
    IntendedDifference(
        "Ranks that pass different arguments, or the same names of parameters in different orders",
        "Pairs parameters by their order. Different arguments may hang.",
        "An error names the argument or parameter. Names and bucket sizes may differ; rank 0's sizes are used.",
        "Gradients of different layers would be mixed.",
    ),
    IntendedDifference(
        "Transport between CPU ranks of one host",
        "The process group.",
        "Shared memory.",
        'It is faster. `transport="torch"` uses the process group.',
    ),
    IntendedDifference(
        "Divisor over NCCL",
        "Gradients are divided before the sum.",
        "Gradients are divided before the sum, which is sent as a plain sum.",
        "`ncclAvg` disables NCCL's symmetric kernels and NVLS.",
    ),
    IntendedDifference(
        "Gradients in a forked child process",
        "Show the values at the fork.",
        "Pages that the child has not written follow the parent's later steps. A backward pass there raises.",
        "A copy per child would cost the memory of all gradients.",
    ),
    IntendedDifference(
        "Error texts",
        "Name the rank or the index of a parameter.",
        "Name parameters, modules, files and lines; the exception types are torch's.",
        "A message should say what to change.",
    ),
    IntendedDifference(
        "Last bits of a step",
        "Fuses a product and the sum after it where the processor can.",
        "Rounds each product and each sum.",
        "A step has the same bits on every instruction set and on GPUs. Trajectories part slowly, as between two "
        "processors under torch.",
    ),
    IntendedDifference(
        "Attributes `grad_scale` and `found_inf` of an optimizer",
        "Only a step with `fused=True` takes them.",
        "Every step takes them.",
        "A scaler leaves the division to the step.",
    ),
    IntendedDifference(
        "Adam's update",
        "Divides twice per element.",
        "Divides once per element.",
        "It is faster. The update is the same up to its last bits.",
    ),
    IntendedDifference(
        "Memory of a `.grad` between `unscale_()` and `zero_grad()` on the CPU",
        "Unscaled and clipped.",
        "Scaled until something looks at a `.grad`. Only an address taken by `.data_ptr()` before, whose tensor "
        "nothing holds, shows it.",
        "The step reads gradients once for both factors. `torch.amp.GradScaler` and torch's clipping write at once.",
    ),
    IntendedDifference(
        "Steps of 16-bit parameters",
        "Round to 16 bits after each operation.",
        "Compute in float32 and round each result once.",
        "Squares of float16 gradients near 1e-3 vanish in torch, whose RMSprop then divides by 0. In float16, 99 of "
        "928 steps with special gradients differ by more than rounding. `state_bits=32` also keeps them in the state.",
    ),
    IntendedDifference(
        "Range of Adafactor's sums",
        "Sums squares and multiplies means in the parameter's dtype.",
        "Sums squares in float64 and multiplies roots.",
        "Gradients above 4e9 in float32, or 255 in float16, overflow in torch.",
    ),
    IntendedDifference(
        "Dtype of loaded optimizer states",
        "Casts states to the parameter's dtype.",
        "Keeps the stored dtype.",
        "A state of 8 or 32 bits must survive `load_state_dict()`.",
    ),
    IntendedDifference(
        "Memory of the C library on the CPU",
        "Returns large freed blocks to the system.",
        "Lets glibc keep up to 64 MiB for the next gradients.",
        "Fresh pages cost time in every step. `MALLOC_TRIM_THRESHOLD_` overrides it.",
    ),
)


def as_markdown() -> str:
    """Formats the differences as the table of docs/limitations.md."""
    rows = ["| Topic | torch | drivetrain | Reason |", "| --- | --- | --- | --- |"]
    rows += [f"| {each.topic} | {each.torch} | {each.drivetrain} | {each.reason} |" for each in DIFFERENCES]
    return "\n".join(rows)
