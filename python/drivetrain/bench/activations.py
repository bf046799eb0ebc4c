"""What keeping fewer activations costs: a budget against its own bound and against torch's ways; checkpointed
regions."""

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.progress import Progress
from torch import Tensor, nn

from ..activation import ActivationPlan, activation_budget
from . import activation_regions, activation_rivals
from .activation_memory import allocated, peak_of_alive
from .activation_models import Case, cases, num_cases
from .measure import Row, interleaved, ratio_of_medians

REGIONS = activation_regions.REGIONS
SHARES = (80, 50, 30)  # percent of what is kept without a budget
STEPS_PER_ROUND = 3  # rounds of the other rows that one of a step's costs
MIB = 2**20

BOUND_TARGET = 1.25
NO_SLOWER_TARGET = 1.0
EVERY_SECOND_TARGET = 0.5
CLOSE_TARGET = 0.95
ACCOUNT_TARGET = 0.02
PLANNING_TARGET_S = 1.0


@dataclass
class Variant:
    """A way to run a model's step; all of a case share their parameters."""

    name: str
    case: Case
    model: nn.Module
    plan: ActivationPlan | None = None
    peak_bytes: int = 0  # of activations
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, case: Case) -> "Variant":
        shared = {id(tensor): tensor for tensor in (*case.model.parameters(), *case.model.buffers())}
        return cls(name, case, copy.deepcopy(case.model, shared))

    def forward(self) -> Tensor:
        loss: Tensor = self.model(*self.case.batch)
        return loss

    def step(self) -> None:
        """Random numbers are every step's and every variant's."""
        torch.manual_seed(1)
        self.model.zero_grad(set_to_none=True)
        self.forward().backward()  # type: ignore[no-untyped-call]

    def added(self, plain: "Variant") -> list[float]:
        return [a - b for a, b in zip(self.seconds, plain.seconds, strict=True)]


@dataclass
class Findings:
    """What belongs to all models together."""

    against_request: list[tuple[float, str]] = field(default_factory=list)
    against_allocator: list[tuple[float, str]] = field(default_factory=list)
    planning_seconds: list[tuple[float, str, float]] = field(default_factory=list)  # beyond three steps; and those


def run(rounds: int) -> list[Row]:
    """The rows for budgets, model by model, and those for regions, on one thread and in its CPU time; gradients with a
    budget must have the bits that they have without, or this raises."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[Row] = []
    findings = Findings()
    try:
        with Progress(transient=True) as progress:
            task = progress.add_task("models", total=num_cases())
            for case in cases():
                progress.update(task, description=case.name)
                rows += _budget_rows(case, max(rounds // STEPS_PER_ROUND, 3), findings)
                progress.advance(task)
    finally:
        torch.set_num_threads(before)
    return [*_common_rows(findings), *rows, *activation_regions.run(rounds)]


def _budget_rows(case: Case, rounds: int, findings: Findings) -> list[Row]:
    plain = Variant.of("without", case)
    for _ in range(2):
        plain.step()
    plain_s = statistics.median(_seconds(plain.step) for _ in range(3))
    plain.peak_bytes = peak_of_alive(plain.forward, plain.model, case.batch)
    everything = _planned("everything kept", case, "200%")
    budgets = [_planned(f"{share} %", case, f"{share}%", plain_s, findings) for share in SHARES]
    ways: list[tuple[str, Callable[[list[nn.Module]], None]]] = [
        ("full checkpointing", activation_rivals.full),
        ("every 2nd block", functools.partial(activation_rivals.every, 2)),
    ]
    if case.is_transformer:
        ways.append(("torch's selective policy", activation_rivals.selective))
    rivals = [_rival(name, case, way) for name, way in ways]
    matched = [_planned(rival.name, case, rival.peak_bytes, plain_s, findings) for rival in rivals]
    planned = [everything, *budgets, *matched]
    variants = [variant for variant in (plain, *planned, *rivals) if variant is not None]
    _compare_gradients(variants)
    for variant in variants:
        _check_accounts(variant, findings)
    timed = interleaved([variant.step for variant in variants], rounds, warm_up=1, clock=time.process_time)
    for variant, seconds in zip(variants, timed, strict=True):
        variant.seconds = seconds

    rows = [_recording_row(case, plain, everything)] if everything else []
    for share, ours in zip(SHARES, budgets, strict=True):
        rows += _bound_rows(case, share, plain, ours)
    rows += [_rival_row(case, plain, rival, ours) for rival, ours in zip(rivals, matched, strict=True)]
    half, second = budgets[SHARES.index(50)], rivals[1]
    if half is not None:
        what = f"{case.name}: added time, every 2nd block checkpointed ({_mib(second.peak_bytes)}) | 50 % of memory"
        rows.append(_added_row(what, second.added(plain), half.added(plain), EVERY_SECOND_TARGET))
    for variant in variants:
        if variant.plan is not None:
            variant.plan.remove()
    return rows


def _planned(
    name: str, case: Case, budget: int | str, plain_s: float = 0.0, findings: Findings | None = None
) -> Variant | None:
    """None: no such plan is possible."""
    variant = Variant.of(name, case)
    begin = time.process_time()
    try:
        variant.plan = plan = activation_budget(variant.model, variant.step, budget)
    except ValueError:
        return None
    seconds = time.process_time() - begin
    assert plan.measured_bytes is not None, "the step was run under the plan"
    variant.peak_bytes = plan.measured_bytes
    if findings is not None:
        what = f"{case.name}, {name}"
        findings.against_request.append((plan.measured_bytes / plan.budget_bytes, what))
        findings.planning_seconds.append((seconds - 3 * plain_s, what, 3 * plain_s))
    return variant


def _rival(name: str, case: Case, way: Callable[[list[nn.Module]], None]) -> Variant:
    variant = Variant.of(name, case)
    way(case.blocks(variant.model))
    variant.step()
    variant.peak_bytes = peak_of_alive(variant.forward, variant.model, case.batch)
    return variant


def _seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _compare_gradients(variants: list[Variant]) -> None:
    """Of all against the first, which has no budget; buffers, too, except where torch runs a block's forward twice and
    with it BatchNorm."""
    model = variants[0].model
    before = [buffer.clone() for buffer in model.buffers()]
    expected: list[Tensor | None] | None = None
    for variant in variants:
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        variant.step()
        is_torchs = variant.plan is None
        results = [p.grad for p in model.parameters()]
        results += [buffer.clone() for buffer in model.buffers()]
        if expected is None:
            expected = results
        num = len(list(model.parameters())) if is_torchs else len(results)
        for have, want in itertools.islice(zip(results, expected, strict=True), num):
            same = want is None if have is None else want is not None and torch.equal(have, want)
            if not same:
                raise AssertionError(f"{variant.case.name}: gradients or buffers differ with {variant.name}")


def _check_accounts(variant: Variant, findings: Findings) -> None:
    """What is kept at the end of forward, as the plan says and as the allocator does."""
    if variant.plan is None:
        return
    variant.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    at_end: list[int] = []

    def forward() -> Tensor:
        loss = variant.forward()
        assert variant.plan is not None
        at_end.append(variant.plan.live_bytes)
        return loss

    grown, _ = allocated(forward)
    findings.against_allocator.append((at_end[0] / grown, f"{variant.case.name}, {variant.name}"))


# ---- Rows


def _recording_row(case: Case, plain: Variant, everything: Variant) -> Row:
    assert everything.plan is not None
    num_ops = sum(len(one.ops) for one in everything.plan._trace.passes)
    us = [1e6 * seconds / num_ops for seconds in everything.added(plain)]
    _, low, high = ratio_of_medians([1.0] * len(us), us)
    what = f"{case.name}: a step, without | recorded with everything kept: {statistics.median(us):.1f} us for each of "
    what += f"{num_ops} operations [{low:.1f}, {high:.1f}]"
    ratio, low, high = ratio_of_medians(plain.seconds, everything.seconds)
    medians = 1e3 * statistics.median(plain.seconds), 1e3 * statistics.median(everything.seconds)
    return Row(what, "ms", *medians, ratio, low, high)


def _bound_rows(case: Case, share: int, plain: Variant, ours: Variant | None) -> list[Row]:
    what = f"{case.name}, {share} % of {_mib(plain.peak_bytes)}"
    if ours is None:
        return [Row(f"{what}: no plan is as small", "ms", 0.0)]
    plan, added = ours.plan, ours.added(plain)
    assert plan is not None
    return [
        _added_row(
            f"{what}: added time, the solver's bound | measured", [plan.bound_seconds] * len(added), added, 1.25
        ),
        _added_row("  the plan's own prediction | measured", [plan.planned_seconds] * len(added), added),
    ]


def _rival_row(case: Case, plain: Variant, rival: Variant, ours: Variant | None) -> Row:
    share = 100 * rival.peak_bytes / plain.peak_bytes
    what = f"{case.name}: added time, {rival.name} | a budget of its {_mib(rival.peak_bytes)} ({share:.0f} %)"
    theirs = rival.added(plain)
    if ours is None:
        return Row(f"{what}: no plan is as small", "ms", 1e3 * statistics.median(theirs), met=False)
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
    rows = []
    least, most = min(findings.against_request), max(findings.against_request)
    num = len(findings.against_request)
    rows.append(Row(f"peak against the request, highest of {num} ({most[1]})", "", 1.0, most[0]))
    rows[-1].target, rows[-1].met = "<= 1", most[0] <= 1
    rows.append(Row(f"peak against the request, lowest of {num} ({least[1]})", "", 1.0, least[0]))
    rows[-1].target, rows[-1].met = f">= {CLOSE_TARGET:g} where possible", least[0] >= CLOSE_TARGET
    furthest = max(findings.against_allocator, key=lambda found: abs(found[0] - 1))
    what = f"bytes at the end of forward, the allocator's growth | the plan's, furthest of {num} ({furthest[1]})"
    rows.append(Row(what, "", 1.0, furthest[0]))
    rows[-1].target, rows[-1].met = f"within {100 * ACCOUNT_TARGET:g} %", abs(furthest[0] - 1) <= ACCOUNT_TARGET
    slowest = max(findings.planning_seconds)
    what = f"planning, three steps | beyond them, slowest of {num} ({slowest[1]})"
    rows.append(Row(what, "s", slowest[2], slowest[0]))
    rows[-1].target, rows[-1].met = f"<= {PLANNING_TARGET_S:g} s beyond", slowest[0] <= PLANNING_TARGET_S
    return rows


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
