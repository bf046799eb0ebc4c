"""Measures the time that activation budgets add to a step, against a lower bound and torch's checkpointing."""

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from drivetrain.bench.measure import Row, interleaved, ratio_of_medians
from drivetrain.budget import ActivationPlan, activation_budget

from . import activation_batches, activation_paths, activation_regions, activation_rivals
from .activation_memory import allocated, keep_freed_memory, peak_of_alive
from .activation_models import GPT, VOCABULARY, ModelCase, cases, children_of, num_cases

REGIONS = activation_regions.REGIONS
SHARES = (80, 50, 30)  # percent of the bytes kept without a budget
ROUNDS_PER_STEP = 4  # rounds of the region benchmark per round of a model's step
STEP_S = 0.4  # a longer step runs proportionally fewer rounds
MIB = 2**20

BOUND_TARGET = 1.25
NO_SLOWER_TARGET = 1.0
EVERY_SECOND_TARGET = 0.5
CLOSE_TARGET = 0.95
ACCOUNT_TARGET = 0.02
PLANNING_TARGET_S = 1.0
UNORDERED_TOLERANCE = 0.02  # relative; for bfloat16 gradients that torch's kernels sum in any order


@dataclass
class Variant:
    """A way to run a model's step. All variants of a case share their parameters."""

    name: str
    case: ModelCase
    model: nn.Module
    plan: ActivationPlan | None = None
    peak_bytes: int = 0  # of activations; unused with a plan
    seconds: list[float] = field(default_factory=list)
    replay_seconds: float = 0.0  # per step

    @classmethod
    def of(cls, name: str, case: ModelCase) -> "Variant":
        shared = {id(tensor): tensor for tensor in (*case.model.parameters(), *case.model.buffers())}
        return cls(name, case, copy.deepcopy(case.model, shared))

    def forward(self) -> Tensor:
        loss: Tensor = self.model(*self.case.batch)
        return loss

    def step(self) -> None:
        """Runs a step; every step of every variant draws the same random numbers."""
        torch.manual_seed(1)
        self.model.zero_grad(set_to_none=True)
        self.forward().backward()

    def added(self, plain: "Variant") -> list[float]:
        return [a - b for a, b in zip(self.seconds, plain.seconds, strict=True)]


@dataclass
class Findings:
    """Ratios over all models, each with the name of its case."""

    against_request: list[tuple[float, str]] = field(default_factory=list)
    against_bound: list[tuple[float, str]] = field(default_factory=list)
    replays_against_bound: list[tuple[float, str]] = field(default_factory=list)
    against_allocator: list[tuple[float, str]] = field(default_factory=list)
    against_rival: list[tuple[float, str]] = field(default_factory=list)  # peaks of the allocator, including gradients
    planning: list["Planning"] = field(default_factory=list)


@dataclass
class Planning:
    """Seconds that planning took: in total, in the three steps that it ran (two of them profiled), and three plain
    steps."""

    what: str
    whole: float
    steps: float
    plain_steps: float


def run(rounds: int) -> list[Row]:
    """Returns the rows for budgets, by model, and the rows for regions, in CPU time of one thread.

    Raises:
        AssertionError: Gradients with a budget differ from gradients without one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows: list[Row] = []
    findings = Findings()
    try:
        with Progress(transient=True) as progress:
            task = progress.add_task("models", total=num_cases())
            for case in cases():
                progress.update(task, description=case.name)
                rows += _budget_rows(case, rounds, findings)
                progress.advance(task)
        recording = _recording_row(10 * rounds)
        others = [*activation_batches.rows(), *activation_paths.rows()]
    finally:
        torch.set_num_threads(before)
    return [*_common_rows(findings), *rows, recording, *others, *activation_regions.run(rounds)]


def _budget_rows(case: ModelCase, rounds: int, findings: Findings) -> list[Row]:
    plain = Variant.of("without", case)
    for _ in range(2):
        plain.step()
    plain_s = statistics.median(seconds_of(plain.step) for _ in range(3))
    rounds = max(round(rounds / ROUNDS_PER_STEP * min(1.0, STEP_S / plain_s)), 3)
    plain.peak_bytes = peak_of_alive(plain.forward, plain.model, case.batch)
    budgets = [_planned(case, share, plain_s, findings) for share in SHARES]
    profiled = next((ours.plan.to_dict() for ours in budgets if ours is not None and ours.plan is not None), None)
    if profiled is None:
        raise AssertionError(f"{case.name}: no plan is possible with any of {SHARES} %")
    everything = _planned_again("everything kept", case, profiled, 2 * plain.peak_bytes)
    assert everything is not None, "the budget exceeds the peak"
    ways: list[tuple[str, Callable[[list[nn.Module]], None]]] = [
        ("full checkpointing", activation_rivals.full),
        ("every 2nd block", functools.partial(activation_rivals.every, 2)),
    ]
    if case.is_transformer:
        ways.append(("torch's selective policy", activation_rivals.selective))
    rivals = [_rival(name, case, way) for name, way in ways]
    matched = [_planned_again(rival.name, case, profiled, rival.peak_bytes) for rival in rivals]
    planned = [everything, *budgets, *matched]
    variants = [variant for variant in (plain, *planned, *rivals) if variant is not None]
    _compare_gradients(variants)
    peaks = {id(variant): _allocated_peak(variant, findings) for variant in variants}
    for rival, ours in zip(rivals, matched, strict=True):
        if ours is not None:
            name = f"{case.name}, {rival.name}"
            findings.against_rival.append((peaks[id(ours)] / peaks[id(rival)], name))
    for variant in variants:
        if variant.plan is not None:
            variant.plan.reset_peak()
    timed = interleaved([variant.step for variant in variants], rounds, warm_up=1, clock=time.process_time)
    for variant, seconds in zip(variants, timed, strict=True):
        variant.seconds = seconds
        if variant.plan is not None:
            variant.replay_seconds = variant.plan.replay_seconds / (rounds + 1)
    for ours in budgets:
        if ours is not None and ours.plan is not None:
            share_of_bound = ours.replay_seconds / ours.plan.bound_seconds
            findings.replays_against_bound.append((share_of_bound, f"{case.name}, {ours.name}"))

    rows = [_bound_row(case, share, plain, everything, ours) for share, ours in zip(SHARES, budgets, strict=True)]
    rows += [_rival_row(case, plain, rival, ours) for rival, ours in zip(rivals, matched, strict=True)]
    half, second = budgets[SHARES.index(50)], rivals[1]
    if half is not None:
        what = f"{case.name}: added time, every 2nd block checkpointed ({_mib(second.peak_bytes)}) | 50 % of memory"
        rows.append(_added_row(what, second.added(plain), half.added(plain), EVERY_SECOND_TARGET))
    for variant in variants:
        if variant.plan is None:
            continue
        if variant is not everything:
            share_of_request = variant.plan.peak_bytes / variant.plan.budget_bytes
            findings.against_request.append((share_of_request, f"{case.name}, {variant.name}"))
        variant.plan.remove()
    return rows


def _planned(case: ModelCase, share: int, plain_s: float, findings: Findings) -> Variant | None:
    """Plans a share of the bytes; returns None if no such plan is possible."""
    variant = Variant.of(f"{share} %", case)
    variant.model.zero_grad(set_to_none=True)  # otherwise planning copies the gradients
    in_steps = 0.0

    def step() -> None:
        nonlocal in_steps
        in_steps += seconds_of(variant.step)

    begin = time.process_time()
    try:
        plan = activation_budget(variant.model, step, f"{share}%")
    except ValueError:
        return None
    what = f"{case.name}, {share} %"
    findings.planning.append(Planning(what, time.process_time() - begin, in_steps, 3 * plain_s))
    findings.against_bound.append((plan.planned_seconds / plan.bound_seconds, what))
    return _installed(variant, plan)


def _planned_again(name: str, case: ModelCase, profiled: dict[str, Any], budget: int) -> Variant | None:
    """Plans from an existing profile; returns None if no such plan is possible."""
    variant = Variant.of(name, case)
    try:
        plan = activation_budget(variant.model, variant.step, budget, plan=profiled)
    except ValueError:
        return None
    return _installed(variant, plan)


def _installed(variant: Variant, plan: ActivationPlan) -> Variant:
    plan.reset_peak()  # excludes the steps of planning
    variant.plan = plan
    return variant


def _rival(name: str, case: ModelCase, way: Callable[[list[nn.Module]], None]) -> Variant:
    variant = Variant.of(name, case)
    way(case.blocks(variant.model))
    variant.step()
    variant.peak_bytes = peak_of_alive(variant.forward, variant.model, case.batch)
    return variant


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _compare_gradients(variants: list[Variant]) -> None:
    """Compares gradients and buffers of all variants with the first variant's, which has no budget.

    The first variant runs twice. Results that differ between its runs come from torch kernels that sum in any order.
    These are compared within a tolerance; all others must have the same bits. Buffers are not compared for torch's
    checkpointing, which runs BatchNorm twice.
    """
    model = variants[0].model
    before = [buffer.clone() for buffer in model.buffers()]

    def results_of(variant: Variant) -> list[Tensor | None]:
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        variant.step()
        return [p.grad for p in model.parameters()] + [buffer.clone() for buffer in model.buffers()]

    expected = results_of(variants[0])
    is_repeatable = [_are_equal(a, b) for a, b in zip(results_of(variants[0]), expected, strict=True)]
    for variant in variants[1:]:
        is_torchs = variant.plan is None
        num = len(list(model.parameters())) if is_torchs else len(expected)
        compared = zip(results_of(variant), expected, is_repeatable, strict=True)
        for have, want, repeatable in itertools.islice(compared, num):
            if not (_are_equal(have, want) if repeatable else _are_close(have, want)):
                raise AssertionError(f"{variant.case.name}: gradients or buffers differ with {variant.name}")


def _are_equal(have: Tensor | None, want: Tensor | None) -> bool:
    return want is None if have is None else want is not None and torch.equal(have, want)


def _are_close(have: Tensor | None, want: Tensor | None) -> bool:
    """Returns True if the difference can come from another order of additions."""
    if have is None or want is None:
        return have is want
    return bool((have - want).float().norm() <= UNORDERED_TOLERANCE * want.float().norm())


def _allocated_peak(variant: Variant, findings: Findings) -> int:
    """Returns the allocator's peak in a step. Also compares the plan's bytes at the end of forward with the
    allocator's."""
    variant.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    at_end: list[int] = []

    def forward() -> Tensor:
        loss = variant.forward()
        if variant.plan is not None:
            at_end.append(variant.plan.live_bytes)
        return loss

    grown, peak = allocated(forward)
    if at_end:
        findings.against_allocator.append((at_end[0] / grown, f"{variant.case.name}, {variant.name}"))
    return peak


# ---- Rows


def _bound_row(case: ModelCase, share: int, plain: Variant, everything: Variant, ours: Variant | None) -> Row:
    what = f"{case.name}, {share} % of {_mib(plain.peak_bytes)}"
    if ours is None:
        return Row(f"{what}: no plan is that small", "ms", 0.0, met=False)
    plan, added = ours.plan, ours.added(plain)
    assert plan is not None
    recording_ms = 1e3 * statistics.median(everything.added(plain))
    what += f": added time, the lower bound | measured (planned {1e3 * plan.planned_seconds:.2f} ms; in replays "
    what += f"{1e3 * ours.replay_seconds:.2f} ms; recording with everything kept {recording_ms:.2f} ms)"
    return _added_row(what, [plan.bound_seconds] * len(added), added, BOUND_TARGET)


def _recording_row(rounds: int) -> Row:
    """Measures a model so small that the host's time dominates."""
    torch.manual_seed(0)
    model = GPT(dim=12, length=8)
    case = ModelCase("a tiny GPT", model, tuple(torch.randint(VOCABULARY, (2, 1, 8))), lambda m: [], True)
    plain, recorded = Variant.of("without", case), Variant.of("recorded", case)
    plan = activation_budget(recorded.model, recorded.step, "200%")
    num_ops = sum(len(one.ops) for one in plan._trace.passes)
    times = interleaved([plain.step, recorded.step], rounds, clock=time.process_time)
    plan.remove()
    us = [[1e6 * seconds / num_ops for seconds in each] for each in times]
    ratio, low, high = ratio_of_medians(us[0], us[1])
    what = f"{case.name}: host time of a step for each of its {num_ops} operations, without | recorded"
    return Row(what, "us", statistics.median(us[0]), statistics.median(us[1]), ratio, low, high)


def _rival_row(case: ModelCase, plain: Variant, rival: Variant, ours: Variant | None) -> Row:
    share = 100 * rival.peak_bytes / plain.peak_bytes
    what = f"{case.name}: added time, {rival.name} | a budget of its {_mib(rival.peak_bytes)} ({share:.0f} %)"
    theirs = rival.added(plain)
    if ours is None:
        return Row(f"{what}: no plan is that small", "ms", 1e3 * statistics.median(theirs), met=False)
    row = _added_row(what, theirs, ours.added(plain))
    assert row.low is not None
    row.target, row.met = "lower end <= 1", row.low <= NO_SLOWER_TARGET
    return row


def _added_row(what: str, theirs: list[float], ours: list[float], target: float | None = None) -> Row:
    ratio, low, high = ratio_of_medians(theirs, ours)
    row = Row(what, "ms", 1e3 * statistics.median(theirs), 1e3 * statistics.median(ours), ratio, low, high)
    if target is not None:
        row.target, row.met = f"<= {target:g}", ratio <= target
    return row


def _common_rows(findings: Findings) -> list[Row]:
    highest, lowest = max(findings.against_request), min(findings.against_request)
    num = len(findings.against_request)
    allocator = max(findings.against_allocator, key=lambda found: abs(found[0] - 1))
    rows = [
        _worst_row(f"peak against the budget, highest of {num}", highest, "<= 1", highest[0] <= 1),
        _worst_row(
            f"peak against the budget, lowest of {num}",
            lowest,
            f">= {CLOSE_TARGET:g} where such a plan exists",
            lowest[0] >= CLOSE_TARGET,
        ),
        _worst_row(
            f"bytes at the end of forward, the plan's against the allocator's, largest deviation of "
            f"{len(findings.against_allocator)}",
            allocator,
            f"within {ACCOUNT_TARGET:.0%}",
            abs(allocator[0] - 1) <= ACCOUNT_TARGET,
        ),
        _worst_row(
            f"planned added time against the lower bound, highest of {len(findings.against_bound)}",
            max(findings.against_bound),
        ),
        _worst_row(
            f"time in replays against the lower bound, median of {len(findings.replays_against_bound)}",
            sorted(findings.replays_against_bound)[len(findings.replays_against_bound) // 2],
        ),
        _worst_row(
            f"time in replays against the lower bound, highest of {len(findings.replays_against_bound)}",
            max(findings.replays_against_bound),
        ),
    ]
    if findings.against_rival:
        what = "the allocator's peak in a step against torch's checkpointing at equal activation peaks, highest of"
        rows.append(_worst_row(f"{what} {len(findings.against_rival)}", max(findings.against_rival)))
    longest = max(findings.planning, key=lambda planning: planning.whole - planning.steps)
    slowest = max(findings.planning, key=lambda planning: planning.whole / planning.plain_steps)
    beyond, num = longest.whole - longest.steps, len(findings.planning)
    return [
        *rows,
        Row(
            f"planning: its three steps | the time beyond them, longest of {num} ({longest.what})",
            "s",
            longest.steps,
            beyond,
            target=f"<= {PLANNING_TARGET_S:g} s",
            met=beyond <= PLANNING_TARGET_S,
        ),
        Row(
            f"planning: three steps without a budget | all of planning, highest ratio of {num} ({slowest.what})",
            "s",
            slowest.plain_steps,
            slowest.whole,
        ),
    ]


def _worst_row(what: str, worst: tuple[float, str], target: str = "", met: bool | None = None) -> Row:
    return Row(f"{what} ({worst[1]})", "", 1.0, worst[0], target=target, met=met)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


# ---- On a GPU


def run_gpu(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    """Measures a GPT's step in bfloat16 with a budget, against torch's checkpointing of every block and of every 2nd
    block at equal peaks. Yields added times, peaks of activations and, on a GPU, peaks of the allocator."""
    size = {"depth": 2, "dim": 32, "heads": 2, "length": 16} if is_dry else {"dim": 1024, "heads": 16, "length": 1024}
    torch.manual_seed(0)
    model = GPT(**size).to(device, torch.bfloat16)
    batch = tuple(torch.randint(VOCABULARY, (2, 2 if is_dry else 8, size["length"]), device=device))
    case = ModelCase("GPT in bfloat16", model, batch, lambda m: children_of(m, "blocks"), True)
    plain = Variant.of("nothing recomputed", case)
    for name, way in (
        ("every block", activation_rivals.full),
        ("every 2nd block", functools.partial(activation_rivals.every, 2)),
    ):
        rival = _rival(name, case, way)
        ours = Variant.of("a budget", case)
        try:
            ours.plan = activation_budget(ours.model, ours.step, rival.peak_bytes)
        except ValueError as error:
            yield Row(f"{case.name}, {name} checkpointed: {error}", "MiB", rival.peak_bytes / MIB)
            continue
        _compare_gradients([plain, rival, ours])
        sides = (plain, rival, ours)
        seconds = interleaved([side.step for side in sides], max(rounds // ROUNDS_PER_STEP, 3), device=device)
        for side, measured in zip(sides, seconds, strict=True):
            side.seconds = measured
        what = f"{case.name}: time added to a step of {1e3 * statistics.median(plain.seconds):.1f} ms, {name}"
        what = f"{what} checkpointed ({_mib(rival.peak_bytes)}) and a budget of that"
        yield _added_row(what, rival.added(plain), ours.added(plain))
        assert ours.plan is not None
        row = _peaks_row(
            f"{case.name}: peak of activations, budget and measured", ours.plan.budget_bytes, ours.plan.peak_bytes
        )
        row.target, row.met = "<= 1", ours.plan.peak_bytes <= ours.plan.budget_bytes
        yield row
        if device.type == "cuda":
            yield _allocator_row(device, name, rival, ours)


def _allocator_row(device: torch.device, name: str, rival: Variant, ours: Variant) -> Row:
    peaks = []
    for side in (rival, ours):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        side.step()
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    return _peaks_row(f"the allocator's peak beyond the model's own, {name}", peaks[0], peaks[1])


def _peaks_row(what: str, theirs: int, ours: int) -> Row:
    ratio = ours / theirs
    return Row(what, "MiB", theirs / MIB, ours / MIB, ratio, ratio, ratio)
