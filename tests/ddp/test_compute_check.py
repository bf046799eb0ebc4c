"""Tests that `check_compute` names the rank that computes wrongly, and says nothing of healthy runs."""

import copy
import io
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from drivetrain import DistributedDataParallel, accumulate, check_compute, optim
from drivetrain.compute_check import ComputeError
from drivetrain.compute_check import sums as sums_module
from effort import SEED, covering, rounds
from ranks import GROUP_TIMEOUT_S, run_on


@contextmanager
def warnings_said() -> Iterator[list[str]]:
    """Gives a list that has the check's warnings once the block has ended."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(one.message) for one in caught if "check_compute" in str(one.message)]


def flip_grad(param: Tensor, bit: int = 20) -> None:
    assert param.grad is not None
    flip(param.grad, bit)


def flip(values: Tensor, bit: int = 20) -> None:
    """Flips a bit of the largest float32, as a defective processor or memory does. By default it is of the fraction."""
    bits = values.view(-1).view(torch.int32)
    bits[int(values.view(-1).abs().argmax())] ^= 1 << bit


class Net(nn.Module):
    """Has what a repetition must restore: buffers that ranks change and share, random numbers, and an unused result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("scale", torch.ones(8))  # each rank has its own after a pass, and rank 0's in the next
        self.fault: Callable[[Tensor], Tensor] | None = None
        self.dropout = 0.2
        self.optimizer: Any = None  # for faults in its states

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = torch.tanh(self.spectral(self.norm(self.first(x)))) * scale * self.scale.clone()
        self.scale.copy_(0.9 + 0.1 * hidden.detach().square().mean(0))
        if self.fault is not None:
            hidden = self.fault(hidden)
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        return {"out": [self.last(hidden)], "unused": hidden.sum(), "text": "a text"}


def train(
    net: Net,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
    kind: Any = DistributedDataParallel,
    every: int = 1,
    on_error: str = "raise",
    loop: str = "plain",
) -> tuple[Any, Any]:
    """Trains, and calls `before` ahead of the pass of each step whose gradients are reduced."""
    model = kind(net, bucket_cap_mb=25)
    if loop == "communication hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if loop == "hooks after accumulation":
        for param in net.parameters():
            param.register_post_accumulate_grad_hook(scale_grad)
    check = check_compute(model, every=every, on_error=on_error)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    net.optimizer = optimizer
    torch.manual_seed(7 + dist.get_rank())
    for step in range(steps):
        step_of(model, optimizer, loop, partial(before, step))
    return check, model


LOOPS = ("plain", "accumulate", "no_sync", "kept gradients", "communication hook", "hooks after accumulation")
WRONG_SUMS = (((0, 1, 2), "raise"), ((0, 1, 2), "skip"), ((1,), "raise"))  # their ranks, and on_error


def step_of(model: Any, optimizer: torch.optim.Optimizer, loop: str, before: Callable[[], None]) -> None:
    def loss() -> Tensor:
        return model(torch.randn(5, 6), scale=0.5)["out"][0].square().mean()  # type: ignore[no-any-return]

    if loop == "accumulate":
        with accumulate(model, optimizer, steps=3) as window:
            for place in range(3):
                if place == 2:
                    before()
                window.backward(loss(), weight=1.0 + place + dist.get_rank())
        return
    if loop != "kept gradients":
        optimizer.zero_grad()
    if loop == "no_sync":
        with model.no_sync():
            loss().backward()
    before()
    loss().backward()
    optimizer.step()


def scale_grad(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(1 + dist.get_rank())


def activation(net: Net) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            x = x.clone()
            flip(x)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    net.fault = Wrong.apply


def backward(net: Net) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            grad = grad.clone()
            flip(grad)
            return grad

    net.fault = Wrong.apply


def weight(net: Net) -> None:
    flip(net.first.weight.data)


FAULTS = {"activation": activation, "backward": backward, "weight": weight}


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("fault", FAULTS)
@run_on(3)
def test_a_third_rank_names_the_wrong_one(fault: str, culprit: int) -> None:
    torch.manual_seed(0)
    net = Net()

    def before(step: int) -> None:
        if step == 4 and dist.get_rank() == culprit:
            FAULTS[fault](net)

    with pytest.raises(ComputeError) as caught:
        train(net, 8, before)
    assert caught.value.ranks == (culprit,), caught.value
    assert caught.value.step == 4
    assert f"rank {culprit} (" in str(caught.value)
    assert caught.value.parameter.split(" (")[0] in dict(net.named_parameters())


@run_on(3)
def test_a_step_with_a_wrong_pass_is_skipped() -> None:
    """The processor recovers, so that the training goes on."""
    torch.manual_seed(0)
    net = Net()
    seen: dict[int, list[Tensor]] = {}

    def before(step: int) -> None:
        seen[step] = [param.detach().clone() for param in net.parameters()]
        if dist.get_rank() == 1:
            net.fault = None
            if step == 4:
                activation(net)

    with warnings_said() as said:
        check, _ = train(net, 8, before, on_error="skip")
    (error,) = check.skipped
    assert (error.ranks, error.step) == ((1,), 4)
    assert said == ([f"check_compute skips a step: {error}"] if dist.get_rank() == 0 else [])
    changes = [any(not one.equal(other) for one, other in zip(seen[s], seen[s + 1], strict=True)) for s in range(7)]
    assert changes == [True, True, True, True, False, True, True]
    assert check.checks == 8


@run_on(2)
def test_of_two_ranks_the_unsteady_one_is_wrong() -> None:
    for culprit in range(2):
        torch.manual_seed(0)
        net = Net()
        calls = []

        def now_and_then(hidden: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return hidden * (1.0 + 1e-6 * len(calls))

        def before(step: int, net: Net = net, culprit: int = culprit, wrong: Any = now_and_then) -> None:
            if step == 3 and dist.get_rank() == culprit:
                net.fault = wrong

        with pytest.raises(ComputeError, match="a repetition there gives others") as caught:
            train(net, 8, before)
        assert caught.value.ranks == (culprit,)


@run_on(4)
def test_ranks_of_a_group_have_their_numbers_in_the_job() -> None:
    group = dist.new_group([0, 2, 3], timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    if dist.get_rank() == 1:
        return
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    model = DistributedDataParallel(net, process_group=group)
    check_compute(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    if dist.get_rank() == 2:
        flip(net.weight.data)
    with pytest.raises(ComputeError, match=r"beginning with 'weight': rank 2 \(") as caught:
        optimizer.step()
    assert caught.value.ranks == (2,)


@run_on(2)
def test_a_rank_that_is_unsteady_from_the_start_is_named_in_the_warning() -> None:
    torch.manual_seed(0)
    net, calls = Net(), []
    if dist.get_rank() == 1:
        net.fault = lambda hidden: calls.append(1) or hidden * (1.0 + 1e-6 * len(calls))  # type: ignore[func-returns-value]
    with warnings_said() as said:
        check, _ = train(net, 3)
    assert check.checks == 0
    assert len(said) == (dist.get_rank() == 0)
    assert all(
        re.search(r"This is so on rank 1 \(.*\) only, whose processor may compute wrongly", text) for text in said
    )


@pytest.mark.parametrize("way", ["accumulate", "no_sync", "backward passes"])
@run_on(3)
def test_the_last_of_several_backward_passes_is_repeated(way: str) -> None:
    """Each reduces its gradients: under shard="gradients", and in a plain loop that accumulates without no_sync()."""
    for has_fault in (False, True):
        torch.manual_seed(0)
        net = Net()
        model = DistributedDataParallel(net, **({} if way == "backward passes" else {"shard": "gradients"}))
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        with warnings_said() as said:
            check = check_compute(model, every=2)
            for step in range(6):
                if has_fault and step == 3 and dist.get_rank() == 1:
                    activation(net)
                with pytest.raises(ComputeError) if has_fault and step == 4 else nullcontext() as caught:
                    if way == "backward passes":
                        step_of(model, NoStep(), "kept gradients", int)
                    step_of(model, optimizer, "kept gradients" if way == "backward passes" else way, int)
                if caught is not None:
                    assert (caught.value.ranks, caught.value.step) == ((1,), 4), caught.value
                    break
        assert all("Sums of the all-reduce are not compared" in text for text in said), said
        assert check.checks == 3


class NoStep:
    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


@run_on(2)
def test_of_two_ranks_with_steady_results_both_are_named() -> None:
    torch.manual_seed(0)
    net = Net()

    def before(step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            activation(net)

    with pytest.raises(ComputeError, match=r"rank 0 \(.*\) or rank 1 \(.*\) compute other bits") as caught:
        train(net, 8, before)
    assert caught.value.ranks == (0, 1)


@pytest.mark.parametrize("kind", [DistributedDataParallel, TorchDDP])
@run_on(2)
def test_a_healthy_run_keeps_its_bits(kind: Any) -> None:
    results = []
    for every in (1, 3, 1000):
        torch.manual_seed(0)
        check, model = train(Net(), 9, kind=kind, every=every)
        assert check.checks == -(-9 // every)
        results.append([*model.parameters(), *model.buffers(), torch.get_rng_state()])
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


# ---- Sums of the all-reduce.


def queue(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def at_first_gradient(model: nn.Module, call: Callable[[], None]) -> None:
    """Calls something when the next backward has its first gradient, before it is accumulated."""
    waiting = [call]

    def on_grad(grad: Tensor) -> None:
        if waiting:
            waiting.pop()()

    for param in model.parameters():
        param.register_hook(on_grad)


def at_end_of_reduction(model: nn.Module, call: Callable[[], None]) -> None:
    """Calls something once the next backward has reduced the gradients, before the check reads them."""
    at_first_gradient(model, lambda: queue(lambda: queue(call)))


def add_alone(model: nn.Module, rank: int, aside: Any) -> None:
    """Lets one rank alone add up the gradients of the next backward, in shared memory.

    The others have put all their gradients in when it puts in its first, and wait until it has made all sums.
    """
    meet = partial(dist.barrier, group=aside)
    if dist.get_rank() == rank:
        at_first_gradient(model, meet)
        at_end_of_reduction(model, meet)
    else:
        at_first_gradient(model, lambda: queue(lambda: [meet(), meet()]))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(("loop", "wrong", "on_error"), [(loop, *way) for loop, way in covering(1, LOOPS, WRONG_SUMS)])
@run_on(3)
def test_a_wrong_sum_is_found(loop: str, wrong: tuple[int, ...], on_error: str) -> None:
    aside = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    for kind in (DistributedDataParallel, TorchDDP):
        if loop == "accumulate" and kind is TorchDDP:
            continue
        knows_adder = kind is DistributedDataParallel and loop != "communication hook"
        culprit = LOOPS.index(loop) % 3
        torch.manual_seed(0)
        net = Net()

        def before(step: int, net: Net = net, alone: bool = knows_adder, culprit: int = culprit) -> None:
            if step == 4 and alone:
                add_alone(net, culprit, aside)
            if step == 4 and dist.get_rank() in wrong:
                at_end_of_reduction(net, partial(flip_grad, net.spectral.parametrizations.weight.original))

        if on_error == "skip":
            check, _ = train(net, 8, before, kind, on_error="skip", loop=loop)
            (error,) = check.skipped
        else:
            with pytest.raises(ComputeError) as caught:
                train(net, 8, before, kind, loop=loop)
            error = caught.value
        expected, who = wrong, "one of the 3 ranks adds wrongly.* The transport does not know"
        if len(wrong) == 1:
            who = r"rank 1 \(.*\) has received, or keeps, other sums than the rest"
        elif knows_adder:
            expected, who = (culprit,), rf"rank {culprit} \(.*\) has added up these elements"
        assert (error.ranks, error.step) == (expected, 4), error
        assert error.parameter == "spectral.parametrizations.weight.original"
        text = "all-reduce of step 4 gives something else .* in elements 0 to 63 of "
        assert re.search(rf"{text}'{re.escape(error.parameter)}': {who}", str(error)), error


@pytest.mark.parametrize("fault", ["adder", "sum of own gradient", "sum of the check"])
@run_on(3)
def test_a_repetition_of_a_sum_decides(fault: str) -> None:
    """An adder may be wrong at every call. Sums that only the check makes may be wrong, and a transport is not."""
    culprit = 1
    torch.manual_seed(0)
    net = Net()
    kind = TorchDDP if fault == "adder" else DistributedDataParallel
    with pytest.MonkeyPatch.context() as patch:

        def wrongly(function: Any, is_meant: Callable[[Any], bool] = lambda values: True) -> Any:
            def call(values: Any, *args: Any, **kwargs: Any) -> Tensor:
                found: Tensor = function(values, *args, **kwargs)
                if is_meant(values):
                    found.view(-1)[0] += found.abs().max()
                return found

            return call

        def before(step: int) -> None:
            if step != 4:
                return
            if fault == "adder":
                at_end_of_reduction(net, partial(flip_grad, net.first.weight))
            if fault == "adder" and dist.get_rank() == culprit:
                patch.setattr(sums_module, "_added", wrongly(sums_module._added))
            if fault == "sum of own gradient" and dist.get_rank() == culprit:
                counts = iter([False] * len(list(net.parameters())) + [True])  # one after the reduced gradients
                is_next = lambda values: next(counts, False)  # noqa: E731
                patch.setattr(sums_module, "_of_blocks", wrongly(sums_module._of_blocks, is_next))
            if fault == "sum of the check":
                patch.setattr(sums_module.dist, "all_reduce", reduced_wrongly(dist.all_reduce))

        def reduced_wrongly(function: Any) -> Any:
            def call(values: Tensor, *args: Any, **kwargs: Any) -> Any:
                work = function(values, *args, **kwargs)
                if values.dtype == torch.float64 and values.dim() == 2:
                    values[0, 0] *= 1.25
                return work

            return call

        with pytest.raises(ComputeError) as caught:
            train(net, 8, before, kind)
    who = {
        "adder": "adds up the same gradients differently",
        "sum of own gradient": "gives another sum of its own gradient",
        "sum of the check": "The transport does not know",
    }[fault]
    assert caught.value.ranks == ((0, 1, 2) if fault == "sum of the check" else (culprit,)), caught.value
    assert who in str(caught.value)


@run_on(2)
def test_what_gives_no_sums_is_said_once() -> None:
    """The passes are compared nevertheless."""

    def own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return default_hooks.fp16_compress_hook(None, bucket)

    for kind in (DistributedDataParallel, TorchDDP):
        for hook, reason in (
            (default_hooks.fp16_compress_hook, "communication hook fp16_compress_hook does not give exact sums"),
            (own_hook, "at its first check, an all-reduce does not give sums"),
        ):
            model = kind(nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 50)))
            model.register_comm_hook(None, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with warnings_said() as said:
                check = check_compute(model, every=1)
                for _ in range(4):
                    optimizer.zero_grad()
                    model(torch.randn(5, 24)).square().mean().backward()
                    optimizer.step()
            text = f"check_compute: {reason}. Sums of the all-reduce are not compared."
            assert said == ([text] if dist.get_rank() == 0 else []), said
            assert check.checks == 4


@pytest.mark.parametrize("loop", LOOPS)
@run_on(2)
def test_sums_of_loops_are_compared(loop: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="check_compute")
        check, _ = train(Net(), 8, loop=loop)
    assert check.checks == 8
    assert check._has_sums is True


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 64), nn.Linear(64, 50), nn.Linear(64, 50)

    def forward(self, x: Tensor, has_right: bool = True) -> Tensor:
        hidden = torch.tanh(self.body(x))
        found: Tensor = self.left(hidden) + self.right(hidden) if has_right else self.left(hidden)
        return found.square().mean()


@run_on(2)
def test_sums_of_what_the_last_pass_leaves_out_are_compared() -> None:
    for kind in (DistributedDataParallel, TorchDDP):
        torch.manual_seed(0)
        net = Branches()
        model = kind(net, find_unused_parameters=True)
        check_compute(model, every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def left_out(net: Any = net, model: Any = model, optimizer: Any = optimizer) -> None:
            for step in range(6):
                optimizer.zero_grad()
                with model.no_sync():
                    model(torch.randn(5, 6)).backward()
                if step == 4 and dist.get_rank() == 1:
                    at_end_of_reduction(net, partial(flip_grad, net.right.weight))
                model(torch.randn(5, 6), has_right=False).backward()
                optimizer.step()

        with pytest.raises(ComputeError) as caught:
            left_out()
        error = caught.value
        assert (error.ranks, error.step, error.parameter) == ((1,), 4, "right.weight"), error


@run_on(2)
def test_sums_of_mixed_or_unclear_results_are_not_compared() -> None:
    """Two backward passes in a step mix results, and the sums of gradients may all be as small as rounding."""
    for reason in ("a step has several backward passes", "8 checks had too few sums"):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 50)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with warnings_said() as said:
            check = check_compute(model, every=1)
            for _ in range(12):
                optimizer.zero_grad()
                loss = model(torch.randn(5, 6)).square().mean()
                if reason.startswith("a step"):
                    loss.backward(retain_graph=True)
                    (0.5 * loss).backward()
                else:
                    (0.0 * loss).backward()
                optimizer.step()
        assert len(said) == (dist.get_rank() == 0), said
        assert all(reason in text and "Sums of the all-reduce are not compared" in text for text in said), said
        assert check._has_sums is False


# ---- Faults between two checks.


@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq"])
@run_on(3)
def test_what_memory_keeps_is_found_at_the_next_check(kind: str) -> None:
    """A fault comes before a step or after the last one ahead of a check, also of the first check that has states."""
    draw = random.Random(SEED)
    for at in (4, 5, draw.randrange(6, 9), 9):
        culprit = draw.randrange(3)
        torch.manual_seed(0)
        net = Net()
        place = draw.randrange(len(list(net.parameters())))
        name, param = list(net.named_parameters())[place]

        def before(step: int, at: int = at, culprit: int = culprit, net: Net = net, param: Any = param) -> None:
            if step == at and dist.get_rank() == culprit:
                flip(param.data if kind == "weight" else net.optimizer.state[param][kind], 22)

        with pytest.raises(ComputeError) as caught:
            train(net, 20, before, every=5)
        assert caught.value.ranks == (culprit,), caught.value
        assert caught.value.step == -(-at // 5) * 5, (at, caught.value)
        assert caught.value.parameter.split(" (")[0] == name


def clamp_grad(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.clamp_(-5e-5, 5e-5)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    covering(1, [DistributedDataParallel, TorchDDP], [torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
@run_on(3)
def test_sums_of_other_loops_raise_no_alarm(kind: Any, dtype: torch.dtype) -> None:
    """Gradients that are clipped, scaled, kept from the step before, clamped by a hook, or compressed."""
    for case in ("clipped", "scaled", "kept", "clamped", "later clamped", "compressed", "huge"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 50)).to(dtype)
        model = kind(net)
        check = check_compute(model, every=1)
        if case == "clamped":
            for param in net.parameters():
                param.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
                param.register_post_accumulate_grad_hook(clamp_grad)
        if case == "later clamped":
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(clamp_grad)
        if case == "compressed" and dtype == torch.float32:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        torch.manual_seed(dist.get_rank())
        for step in range(8):
            if case != "kept" or step % 4 == 0:
                optimizer.zero_grad()
            scale = 1e-6 if case == "later clamped" and step < 4 else 1.0
            scale *= {"scaled": 1024.0, "huge": torch.finfo(dtype).max}.get(case, 1.0)
            (model(torch.randn(5, 24).to(dtype)).square().mean() * scale).backward()
            if case == "clipped":
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            if case == "huge":
                optimizer.zero_grad()
            optimizer.step()
        assert check.checks == 8, case


@run_on(2)
def test_copies_have_no_check() -> None:
    model = DistributedDataParallel(nn.Linear(6, 3))
    check_compute(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for one in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        one(torch.randn(5, 6)).sum().backward()
        assert one.__dict__["_compute_check"] is None


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: float) -> dict[str, Any]:
        return {"out": [checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)]}


@run_on(2)
def test_what_cannot_be_checked_is_said_once() -> None:
    torch.manual_seed(0)
    drifting, calls = Net(), []
    drifting.fault = lambda hidden: calls.append(1) or hidden * (1.0 + 1e-6 * len(calls))  # type: ignore[func-returns-value]
    cases = {"a repetition of a pass gives other bits": drifting, "a pass of Reentrant cannot be repeated": Reentrant()}
    for reason, net in cases.items():
        with warnings_said() as said:
            check, _ = train(net, 12)  # type: ignore[arg-type]
        assert len(said) == (dist.get_rank() == 0), said
        assert all(re.search(reason, text) for text in said), said
        assert check.checks == 0


@run_on(2)
def test_steps_of_several_passes_are_left_out() -> None:
    model = DistributedDataParallel(Net())
    check = check_compute(model, every=2)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(5, 6))["out"][0].sum().backward()
        outputs = [model(torch.randn(5, 6))["out"][0].sum() for _ in range(2 if step in (0, 2) else 1)]
        model.eval()
        with torch.no_grad():
            model(torch.randn(5, 6))
        model.train()
        sum(outputs, torch.zeros(())).backward()
        optimizer.step()
    assert check.checks == 3  # in steps 1, 3 and 5
    check.remove()
    assert not model._forward_pre_hooks


# ---- Loops and models that a repetition must not mistake for a fault.


class Counting(nn.Module):
    """Does something else in every third pass, and keeps a loss in a list that the loop clears."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.calls, self.losses = 0, []

    def forward(self, x: Tensor, note: Any = None) -> dict[str, Tensor]:
        self.calls += 1
        logits = self.head(torch.tanh(self.body(x)) * (2.0 if self.calls % 3 == 0 else 1.0))
        self.losses.append(logits.square().mean())
        return {"logits": logits, "loss": logits.square().mean()}


class Carrying(Counting):
    """Carries a state over passes, as a language model does over chunks, until a document begins."""

    state: Any = None

    def forward(self, x: Tensor, note: Any = None) -> dict[str, Tensor]:
        self.state = None if x[0, 0] > 0 else self.state
        if self.state is not None:
            x = x + self.state[0]["mean"]
        self.state = ({"mean": x.detach().mean(0)}, "a text")
        return super().forward(x, note)


class Gathering(Counting):
    def forward(self, x: Tensor, note: Any = None) -> dict[str, Tensor]:
        found = super().forward(x)
        total = found["logits"].detach().sum()
        dist.all_reduce(total)
        return {**found, "total": total}


def healthy(net: Counting, step_of: Callable[..., Tensor], every: int = 1, **options: Any) -> tuple[Any, list[str]]:
    model = DistributedDataParallel(net, **options)
    with warnings_said() as said:
        check = check_compute(model, every=every)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(12):
            optimizer.param_groups[0]["lr"] = 0.01 * step

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = step_of(model, step)
                assert len(net.losses) == 1
                net.losses.clear()
                loss.backward()
                return loss

            if options.get("find_unused_parameters"):
                net.body.weight.requires_grad_(step < 6)
            closure() if every == 1 else optimizer.step(closure)
            if every == 1:
                model.eval()
                optimizer.step()
                model.train()
    return check, said


def plain(model: nn.Module, step: int) -> Tensor:
    found = model(torch.randn(4, 6))
    loss: Tensor = found["loss"] + found["logits"].abs().mean()
    return loss


def penalized(model: nn.Module, step: int) -> Tensor:
    found = model(torch.randn(4, 6))["loss"]
    return found + sum(param.square().sum() for param in model.parameters()) if step % 3 == 2 else found


def with_lambda(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(torch.randn(4, 6), note=lambda: None)["loss"]
    return loss


@run_on(3)
def test_healthy_loops_raise_no_alarm() -> None:
    for step_of, options in ((plain, {}), (penalized, {}), (plain, {"find_unused_parameters": True})):
        check, said = healthy(Counting(), step_of, **options)
        assert not said, said
        assert check.checks == 12
    check, said = healthy(Carrying(), plain)
    assert not said, said
    assert check.checks == 12


@run_on(2)
def test_loops_that_cannot_be_checked_train_on() -> None:
    cases: list[tuple[Counting, Callable[..., Tensor], int, str]] = [
        (Counting(), plain, 2, "outside of optimizer.step"),  # in a closure
        (Gathering(), plain, 1, "has collectives"),
        (Counting(), with_lambda, 1, "cannot be sent"),
    ]
    for net, step_of, every, reason in cases:
        _, said = healthy(net, step_of, every)
        assert len(said) == (dist.get_rank() == 0), said
        assert all(reason in text for text in said), said


@run_on(2)
def test_ranks_that_ask_for_different_checks_raise() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"on_error are not the same on all ranks: \[\(1, 'raise'\), \(2, 'raise'\)\]"):
        check_compute(model, every=1 + dist.get_rank())
    check_compute(model)
    with pytest.raises(RuntimeError, match="has a check already"):
        check_compute(model)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="model is a Linear, expected a DistributedDataParallel"):
        check_compute(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every is 0, expected a number of steps, at least 1"):
        check_compute(TorchDDP.__new__(TorchDDP), every=0)
    with pytest.raises(ValueError, match="on_error is 'stop', expected 'raise' or 'skip'"):
        check_compute(TorchDDP.__new__(TorchDDP), on_error="stop")


# ---- Drawn faults and healthy models: WHOLE=1 has a thousand faults and ten thousand steps.


@pytest.mark.parametrize("part", range(rounds(1, 20)))
@run_on(3)
def test_drawn_faults_are_found(part: int) -> None:
    draw = random.Random(SEED + part)
    aside = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    for _ in range(rounds(6, 50)):
        fault, culprit, at, bit, loop = (
            draw.choice(["weight", "state", "gradient", "activation", "backward", "sum", "copy of a sum"]),
            draw.randrange(3),
            draw.randrange(1, 8),
            draw.randrange(20, 27),  # larger exponents end in nan on all ranks
            draw.choice(LOOPS),
        )
        at += fault == "sum"  # as buckets are rebuilt in step 1, and a rank cannot wait there
        every = 1 if "sum" in fault else draw.randrange(1, 5)  # other ranks add wrongly for one step
        knows_adder = loop != "communication hook"
        target = draw.randrange(8)
        torch.manual_seed(draw.randrange(1000))
        net = Net()
        net.dropout = 0.0  # it would hide wrong elements in some steps
        drawn = (fault, culprit, at, bit, loop, every)

        def before(step: int, net: Net = net, drawn: Any = drawn, target: int = target) -> None:
            fault, culprit, at, bit, loop, _ = drawn
            if step != at:
                return
            param = list(net.parameters())[target]
            if fault == "sum" and loop != "communication hook":
                add_alone(net, culprit, aside)
            is_culprit = dist.get_rank() == culprit
            if fault == "sum" or (fault == "copy of a sum" and is_culprit):
                at_end_of_reduction(net, partial(flip_grad, param, bit))
            elif fault == "gradient" and is_culprit:  # once the check has read it
                waiting = [1]
                hook: Any = lambda *_: flip_grad(param, bit) if waiting and waiting.pop() else None  # noqa: E731
                net.optimizer.register_step_pre_hook(hook)
            elif fault == "weight" and is_culprit:
                flip(param.data, bit)
            elif fault == "state" and is_culprit:
                flip(net.optimizer.state[param]["exp_avg"], bit)
            elif is_culprit:
                FAULTS[fault](net)

        with pytest.raises(ComputeError) as caught:
            train(net, at + 6, before, every=every, loop=loop)
        found = caught.value
        expected = (0, 1, 2) if fault == "sum" and not knows_adder else (culprit,)
        assert found.ranks == expected, (drawn, str(found))
        first = at + (fault == "gradient")  # the step that can show it
        assert found.step == -(-first // every) * every, (drawn, str(found))
        if fault in ("weight", "state", "copy of a sum", "sum"):
            assert found.parameter.split(" (")[0] == list(dict(net.named_parameters()))[target], (drawn, str(found))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(20, 8, sparse=True), nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rnn(self.table(ids))[0]


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 2)
        ),
        lambda: torch.randn(3, 2, 6, 6),
    ),
    "sequence": (Sequence, lambda: torch.randint(0, 20, (3, 5))),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        lambda: torch.randn(3, 5, 8),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2)), lambda: torch.randn(4, 6)),
    "bfloat16": (lambda: nn.Linear(6, 6).bfloat16(), lambda: torch.randn(4, 6).bfloat16()),
}


@pytest.mark.parametrize("part", range(rounds(1, 5)))
@pytest.mark.parametrize("name", HEALTHY)
@run_on(2)
def test_healthy_models_raise_no_alarm(name: str, part: int) -> None:
    torch.manual_seed(SEED + part)
    make, draw = HEALTHY[name]
    model = DistributedDataParallel(make())
    check = check_compute(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = rounds(12, 400)
    for _ in range(steps):
        with torch.autocast("cpu", enabled=name == "dropout"):
            loss = model(draw()).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert check.checks == steps
