"""Formats a plan as a table: per block of the model, the bytes saved and recomputed, and the time that takes."""

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from .. import _C
from ..notebook import html_table, text_table
from .plan import ChosenPolicy
from .trace import RECOMPUTE, SAVE, STORAGE_FORMATS, Trace

if TYPE_CHECKING:
    from .budget import ActivationPlan

_SUMMED = (
    "kept_bytes",
    "packed_bytes",
    "offloaded_bytes",
    "recomputed_bytes",
    "planned_seconds",
    "measured_seconds",
)
_EQUAL_SECONDS = 1.03
_LARGEST_SHARE = 1 / 6  # of all bytes; a larger block is split into its parts


def size(num_bytes: float) -> str:
    """Formats bytes, rounded up, so that the result can be passed as a budget."""
    unit, scale = next(
        ((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if num_bytes >= s), ("B", 1)
    )
    return f"{math.ceil(100 * num_bytes / scale) / 100:g} {unit}"


def rows(trace: Trace, choice: ChosenPolicy, measured: list[list[float]] | None) -> list[dict[str, Any]]:
    """Returns one row per block, in order of forward."""
    saved = {use.value for use in trace.uses}
    needed, _ = choice.needed(trace)
    paths: list[tuple[str, ...]] = []
    found: list[dict[str, Any]] = []
    for which, (begin, one) in enumerate(trace.passes_at()):
        for index, op in enumerate(one.ops):
            row: dict[str, Any] = dict.fromkeys(_SUMMED, 0) | {"measured_seconds": None}
            replayed = False
            for write in op.writes:
                value = begin + write
                if value not in needed:
                    continue
                if choice.policy[value] == RECOMPUTE:
                    replayed = True
                    row["recomputed_bytes"] += one.values[write].num_bytes if value in saved else 0
                elif choice.policy[value] == SAVE:
                    row["kept_bytes"] += one.values[write].num_bytes
                else:
                    cost = one.values[write].formats[choice.policy[value] - 1]
                    is_offloaded = cost.storage_format == STORAGE_FORMATS["host"]
                    row["offloaded_bytes" if is_offloaded else "packed_bytes"] += one.values[write].num_bytes
                    if not is_offloaded or choice.copies is None:  # otherwise copies overlap the step
                        row["planned_seconds"] += cost.seconds
            row["planned_seconds"] += (op.seconds or 0.0) if replayed else 0.0
            if measured is not None:
                row["measured_seconds"] = measured[which][index] if which < len(measured) else 0.0
            name = trace.modules[op.module] if op.module >= 0 else ""
            paths.append(tuple(name.split(".")) if name else ())
            found.append(row)
    return [{"block": name, **_sum([found[i] for i in indices])} for name, indices in _blocks(paths, found)]


_COLUMNS = ("block", "kept MiB", "packed MiB", "offloaded MiB", "recomputed MiB", "planned ms", "measured ms")


def render(plan: "ActivationPlan") -> str:
    """Formats a plan for a terminal."""
    return "\n".join([text_table(_COLUMNS, _cells(plan)), *lines(plan)])


def html(plan: "ActivationPlan") -> str:
    """Formats a plan for a notebook."""
    return html_table(lines(plan), _COLUMNS, _cells(plan))


def _cells(plan: "ActivationPlan") -> list[tuple[str, ...]]:
    """Returns one row of cells per block, and their sum."""
    blocks = plan.blocks()
    return [
        (
            row["block"],
            *(f"{row[name] / 2**20:.1f}" for name in _SUMMED[:4]),
            f"{1e3 * row['planned_seconds']:.1f}",
            "" if row["measured_seconds"] is None else f"{1e3 * row['measured_seconds']:.1f}",
        )
        for row in [*blocks, {"block": "all", **_sum(blocks)}]
    ]


def lines(plan: "ActivationPlan") -> list[str]:
    """Returns what the plan keeps, what remains of the allocator's peak, and how it compares, in sentences."""
    measured = "" if plan.measured_bytes is None else f", measured {size(plan.measured_bytes)}"
    found = [
        f"peak of bytes kept for backward: budget {size(plan.budget_bytes)}, planned {size(plan.planned_bytes)}"
        f"{measured}, {size(plan.unplanned_bytes)} without a budget; smallest possible {size(plan.smallest_bytes)}"
    ]
    trace, policy = plan._trace, plan._chosen.policy
    expected, without = (allocated_peak(plan._model, trace, one) for one in (policy, trace.keeping_everything))
    found.append(
        f"expected peak of the allocator above the model: {size(expected)}, {size(without)} without a budget; "
        "gradients and temporaries remain"
    )
    blocks = per_block(trace)
    if blocks is not None:
        is_as_good = blocks.num_bytes <= plan.budget_bytes and blocks.seconds <= _EQUAL_SECONDS * plan.planned_seconds
        found.append(
            f"torch.utils.checkpoint of each module in '{blocks.blocks or 'the model'}' keeps {size(blocks.num_bytes)} "
            f"and adds {1e3 * blocks.seconds:.1f} ms; this plan adds {1e3 * plan.planned_seconds:.1f} ms"
            + (": it is as good here" if is_as_good else "")
        )
    if len(plan.compiled) > 0:
        found.append(str(plan.compiled))
    copies = plan.copies
    if plan.host_link is not None and copies is not None:
        found.append(
            f"offload: measured {plan.host_link}; {copies.num_values} tensors of {size(copies.num_bytes)} are copied "
            f"out and back, and the step waits {1e3 * copies.exposed_seconds:.1f} ms for them"
        )
    return found + [f"note: {note}" for note in plan.notes]


def _all_bytes(row: dict[str, Any]) -> int:
    return int(row["kept_bytes"] + row["packed_bytes"] + row["offloaded_bytes"] + row["recomputed_bytes"])


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for key in _SUMMED:
        values = [part[key] for part in parts]
        total[key] = None if None in values else sum(values)
    return total


def _blocks(paths: list[tuple[str, ...]], found: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """Groups operations by module, in the largest modules that do not exceed their share of all bytes."""
    total = sum(map(_all_bytes, found))

    def split(prefix: tuple[str, ...], indices: list[int]) -> list[tuple[str, list[int]]]:
        size = sum(_all_bytes(found[i]) for i in indices)
        parts: dict[tuple[str, ...], list[int]] = {}
        for i in indices:
            parts.setdefault(paths[i][: len(prefix) + 1], []).append(i)
        if size <= _LARGEST_SHARE * total or list(parts) == [prefix]:
            return [(".".join(prefix) or "the model itself", indices)]
        blocks: list[tuple[str, list[int]]] = []
        for part, members in parts.items():
            name = f"{'.'.join(prefix)} itself".strip() if prefix else "the model itself"
            blocks += [(name, members)] if part == prefix else split(part, members)
        return blocks

    return split((), list(range(len(paths))))


# ---- What the lines below the table compare with.


def allocated_peak(model: nn.Module, trace: Trace, policy: list[int]) -> int:
    """Predicts the most bytes that backward allocates above the model: kept values, gradients and temporaries.

    When backward takes a value, it differentiates an operation that saved it. It allocates gradients of what that
    operation made and read, and a temporary of their size. Gradients of the calling module's parameters remain.

    Args:
        model: The model that was traced.
        trace: The traced step.
        policy: Per value, as `_C.activation_solve` returns it.
    """
    kept = _C.activation_simulate(*trace.for_solver(), policy, timeline=True)["peaks"]
    modules = dict(model.named_modules())
    saved_by: dict[int, list[tuple[int, int]]] = defaultdict(list)  # per value: gradients' bytes, and a module
    for begin, one in trace.passes_at():
        for op, value in one.saves:
            if value < 0 or op >= len(one.ops):
                continue
            touched = [one.values[i].num_bytes for i in {*one.ops[op].reads, *one.ops[op].writes}]
            saved_by[begin + value].append((sum(touched) + max(touched), one.ops[op].module))
    gradients, seen = 0, set()
    peak: int = kept[0]
    for use, num_bytes in zip(trace.uses, kept[1:], strict=True):
        temporary = 0
        for touched_bytes, module in () if use.is_release else saved_by[use.value]:
            temporary = max(temporary, touched_bytes)
            if module >= 0 and module not in seen:
                seen.add(module)
                owner = modules.get(trace.modules[module], nn.Module())  # it may have been removed since
                gradients += sum(param.nbytes for param in owner.parameters(recurse=False) if param.requires_grad)
        peak = max(peak, num_bytes + temporary + gradients)
    return peak


class PerBlock(NamedTuple):
    """The most bytes that `torch.utils.checkpoint` of each block keeps for backward, and the seconds that it adds."""

    blocks: str
    num_bytes: int
    seconds: float


def per_block(trace: Trace) -> PerBlock | None:
    """Predicts checkpointing of each block: of the modules in a list that call the most operations; None: no list."""
    blocks = [re.match(r"(?:(.*?)\.)?(\d+)(\.|$)", name) for name in trace.modules]
    counts: dict[str, int] = defaultdict(int)
    for one in trace.passes:
        for op in one.ops:
            block = blocks[op.module] if op.module >= 0 else None
            if block is not None:
                counts[block[1] or ""] += 1
    if not counts:
        return None
    chosen = max(counts, key=lambda name: counts[name])

    def block_of(module: int) -> str | None:
        block = blocks[module] if module >= 0 else None
        return block[2] if block is not None and (block[1] or "") == chosen else None

    policy = trace.keeping_everything
    for begin, one in trace.passes_at():
        inside = {write: block_of(op.module) for op in one.ops for write in op.writes}
        leaves = {read for op in one.ops for read in op.reads if block_of(op.module) != inside.get(read)}
        for write, number in inside.items():
            if number is not None and write not in leaves and one.values[write].can_recompute:
                policy[begin + write] = RECOMPUTE
    outcome = _C.activation_simulate(*trace.for_solver(), policy)
    return PerBlock(chosen, outcome["peak_bytes"], outcome["seconds"])
