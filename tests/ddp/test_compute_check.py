"""Tests that `check_compute` names the rank that computes wrongly, and says nothing of healthy runs."""

import copy
import io
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from drivetrain import DistributedDataParallel, check_compute, optim
from drivetrain.compute_check import ComputeError
from effort import SEED, covering, rounds
from ranks import run_on


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
        self.optimizer: Any = None  # for faults in its states

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = torch.tanh(self.spectral(self.norm(self.first(x)))) * scale * self.scale.clone()
        self.scale.copy_(0.9 + 0.1 * hidden.detach().square().mean(0))
        if self.fault is not None:
            hidden = self.fault(hidden)
        hidden = nn.functional.dropout(hidden, 0.2, self.training)
        return {"out": [self.last(hidden)], "unused": hidden.sum(), "text": "a text"}


def train(
    net: Net,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
    kind: Any = DistributedDataParallel,
    every: int = 1,
    on_error: str = "raise",
) -> tuple[Any, Any]:
    model = kind(net)
    check = check_compute(model, every=every, on_error=on_error)
    net.optimizer = optimizer = optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7 + dist.get_rank())
    for step in range(steps):
        before(step)
        loss = model(torch.randn(5, 6), scale=0.5)["out"][0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return check, model


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
    assert 4 <= caught.value.step <= 6
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

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check, _ = train(net, 8, before, on_error="skip")
    (error,) = check.skipped
    assert (error.ranks, error.step) == ((1,), 4)
    said = [str(one.message) for one in caught if "check_compute" in str(one.message)]
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


def at_end_of_reduction(model: nn.Module, call: Callable[[], None]) -> None:
    """Calls something once the next backward has reduced the gradients, before the check reads them."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    waiting = [call]

    def on_grad(grad: Tensor) -> None:
        if waiting:
            own = waiting.pop()
            queue(lambda: queue(own))

    for param in model.parameters():
        param.register_hook(on_grad)


@pytest.mark.parametrize("kind", [DistributedDataParallel, TorchDDP])
@pytest.mark.parametrize(("wrong", "on_error"), [((0, 1, 2), "raise"), ((0, 1, 2), "skip"), ((1,), "raise")])
@run_on(3)
def test_a_wrong_sum_is_found(kind: Any, wrong: tuple[int, ...], on_error: str) -> None:
    torch.manual_seed(0)
    net = Net()

    def before(step: int) -> None:
        if step == 4 and dist.get_rank() in wrong:
            at_end_of_reduction(net, partial(flip_grad, net.spectral.parametrizations.weight.original))

    if on_error == "skip":
        check, _ = train(net, 8, before, kind, on_error="skip")
        (error,) = check.skipped
    else:
        with pytest.raises(ComputeError) as caught:
            train(net, 8, before, kind)
        error = caught.value
    assert (error.ranks, error.step) == (wrong, 4)
    assert error.parameter == "spectral.parametrizations.weight.original"
    who = "one of the 3 ranks adds wrongly" if len(wrong) == 3 else r"rank 1 \(.*\) has received, or keeps, other sums"
    text = rf"all-reduce of step 4 gives something else .* in elements 0 to 63 of '{re.escape(error.parameter)}': {who}"
    assert re.search(text, str(error)), error


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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check, _ = train(net, 12)  # type: ignore[arg-type]
        said = [str(one.message) for one in caught if "check_compute" in str(one.message)]
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
    return check, [str(one.message) for one in caught if "check_compute" in str(one.message)]


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
    for _ in range(rounds(6, 50)):
        kind, culprit, at, bit = (
            draw.choice(["weight", "state", "gradient", "activation", "backward", "sum"]),
            draw.randrange(3),
            draw.randrange(1, 5),
            draw.randrange(20, 27),  # larger exponents end in nan on all ranks
        )
        target = draw.randrange(8)
        torch.manual_seed(draw.randrange(1000))
        net = Net()
        model = DistributedDataParallel(net)
        check_compute(model, every=1)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        found = None
        for step in range(at + 40):
            is_now = step == at and dist.get_rank() == culprit
            params = list(net.parameters())
            if step == at and kind == "sum":
                at_end_of_reduction(net, partial(flip_grad, params[target], bit))
            if is_now and kind in ("activation", "backward"):
                FAULTS[kind](net)
            loss = model(torch.randn(5, 6))["out"][0].square().mean()
            optimizer.zero_grad()
            loss.backward()
            if is_now:
                targets = {
                    "weight": [param.data for param in params],
                    "state": [optimizer.state[param]["exp_avg"] for param in params],
                    "gradient": [param.grad for param in params],
                }.get(kind)
                if targets is not None:
                    flip(targets[target], bit)
            try:
                optimizer.step()
            except ComputeError as error:
                found = error
                break
        assert found is not None, (kind, culprit, at, bit)
        assert found.ranks == ((0, 1, 2) if kind == "sum" else (culprit,)), (kind, culprit, at, bit, str(found))
        # Dropout may hide the wrong element for some steps.
        assert at <= found.step <= at + (39 if kind in FAULTS and kind != "weight" else 3), (kind, at, str(found))


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
