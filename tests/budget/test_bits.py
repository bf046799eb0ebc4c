"""Checks that gradients, outputs and buffers under an activation budget have the bits of the same step without one."""

import copy
import ctypes
import importlib
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint
from models import (
    ABOVE,
    MODELS,
    Run,
    Step,
    assert_same_bits,
    fill_free_memory,
    forget_all,
    gradients,
    masks_and_more,
    smallest_in,
)
from torch import Tensor, nn

import drivetrain
from drivetrain import _C
from drivetrain.budget.plan import ChosenPolicy, PlannedOp
from drivetrain.budget.trace import RECOMPUTE, SAVE, Recording, Trace, profile
from effort import rounds


def any_choice(trace: Trace, share: float, choose: random.Random) -> _C.ActivationRecorder:
    """Makes a recorder that recomputes a random share of the values."""
    policy = [
        RECOMPUTE if not can_keep or (can_forget and choose.random() < share) else SAVE
        for one in trace.passes
        for _, can_keep, can_forget, _, _ in one.values
    ]
    recorder = _C.ActivationRecorder()
    recorder.set_plans(ChosenPolicy(policy, 0, 0.0, 0.0, 0, True).tape_plans(trace))
    return recorder


@pytest.mark.parametrize("name", MODELS)
def test_bits_whatever_is_forgotten(name: str) -> None:
    """Tries random policies, most of which no budget would lead to."""
    expected = Run(name).result()
    run, fresh = Run(name), Run(name)
    before = copy.deepcopy(run.model.state_dict())
    trace, _ = profile(run.model, run.step)
    choose = random.Random(0)
    for _ in range(rounds(10, 30)):
        recorder = any_choice(trace, choose.random(), choose)
        run.model.load_state_dict(before)
        run.model.zero_grad()
        run.inputs.grad = None
        if name == "random":
            run.model.own.set_state(fresh.model.own.get_state())
        fill_free_memory()
        with Recording(run.model, recorder):
            assert_same_bits(run.result(), expected)
        assert recorder.live_bytes == 0


class PartlyUnseen(nn.Module):
    """Writes a half of a tensor without a torch operation that shows it, byte by byte what free memory may hold."""

    byte = 0x3F

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        partly = torch.empty_like(x)
        partly[:, :8] = x[:, :8].sin()
        partly.detach().numpy()[:, 8:].view("uint8")[:] = self.byte
        return (x * partly).sum()


@contextmanager
def new_memory_holds(byte: int) -> Iterator[None]:
    """Lets the allocator fill memory that it returns with a byte."""
    m_perturb = -6  # from malloc.h
    libc = ctypes.CDLL("libc.so.6")
    assert libc.mallopt(m_perturb, byte ^ 0xFF)
    try:
        yield
    finally:
        libc.mallopt(m_perturb, 0)


def test_bits_where_new_memory_holds_what_is_written_unseen() -> None:
    """Profiles in memory that holds what the model writes there unseen, as memory of an earlier step does."""
    torch.manual_seed(0)
    model, x = PartlyUnseen(), torch.randn(4, 16)
    expected = gradients(model, lambda: model(x).backward())
    with new_memory_holds(PartlyUnseen.byte):
        trace, _ = profile(model, lambda: model(x).backward())
    choose = random.Random(0)
    for _ in range(rounds(10, 30)):
        recorder = any_choice(trace, choose.random(), choose)
        model.zero_grad()
        with new_memory_holds(0x40), Recording(model, recorder):
            found = gradients(model, lambda: model(x).backward())
        for name, grad in expected.items():
            assert torch.equal(found[name], grad), name


@pytest.mark.parametrize("share", ["70%", "35%"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_and_bytes_within_a_budget(name: str, share: str) -> None:
    expected = Run(name).result()
    run, fresh = Run(name), Run(name)
    plan, budget = None, share
    for _ in range(3):  # profiles measure different times, so their smallest plans differ
        try:
            plan = drivetrain.activation_budget(run.model, run.step, budget)
            break
        except ValueError as error:  # takes the smallest budget that the message names
            run, budget = Run(name), smallest_in(error)
    assert plan is not None, f"what was said to be possible is not, three times: {budget}"
    run.model.load_state_dict(fresh.model.state_dict())
    run.model.zero_grad()
    run.inputs.grad = None
    if name == "random":
        run.model.own.set_state(fresh.model.own.get_state())
    plan.reset_peak()
    assert_same_bits(run.result(), expected)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.live_bytes == 0
    plan.remove()
    assert not run.model._forward_pre_hooks


@pytest.mark.parametrize("way", ["everything forgotten", "everything kept", "80%"])
@ABOVE
def test_every_kind_of_backward(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.LayerNorm(8))
    x = torch.randn(4, 8, requires_grad=True)

    def all_kinds() -> list[Tensor]:
        y = model(x)
        loss = y.square().sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = torch.autograd.grad((slope.norm() - 1) ** 2, list(model.parameters()))
        part = torch.autograd.grad(model(x)[0].sum(), [model[2].weight])
        return [first, again, slope.detach(), *penalty, *part]

    expected = all_kinds()
    step = lambda: model(x).sum().backward()  # noqa: E731
    if way == "everything forgotten":
        forget_all(model, step)
    else:
        drivetrain.activation_budget(model, step, "200%" if way == "everything kept" else way)
    model.zero_grad()
    for one, other in zip(all_kinds(), expected, strict=True):
        assert torch.equal(one, other)


@ABOVE
def test_a_step_on_another_path_is_right() -> None:
    torch.manual_seed(0)

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.skip = -1

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                if index == self.skip:
                    x = x.sin() * 2
                x = layer(x).tanh()
            return x.square().sum()

    model, x = Fickle(), torch.randn(5, 16)
    expected = {}
    for skip in (-1, 0, 2, 3):
        model.skip = skip
        model.zero_grad()
        expected[skip] = gradients(model, lambda: model(x).backward())
    model.skip = -1
    model.zero_grad()
    plan = drivetrain.activation_budget(model, lambda: model(x).backward(), "85%")
    for skip in (2, 0, -1, 3):
        model.skip = skip
        model.zero_grad()
        assert_same_bits(gradients(model, lambda: model(x).backward()), expected[skip])
    assert plan.live_bytes == 0
    skips = itertools.cycle([-1, 2, -1, 0, 1])

    def changing() -> None:
        model.skip = next(skips)
        model(x).backward()

    plan.remove()
    plan = drivetrain.activation_budget(model, changing, "90%")
    assert any("took another path" in note for note in plan.notes)


@ABOVE
def test_other_sizes_than_the_profiled_are_right(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    shapes = [(1, 5), (3, 30), (2, 1)]

    def sizes() -> list[dict[str, Tensor]]:
        found = []
        for index, shape in enumerate(shapes):
            torch.manual_seed(index)
            ids = torch.randint(50, shape)
            model.zero_grad()
            found.append(gradients(model, lambda ids=ids: model(ids).backward()))
        return found

    expected = sizes()
    drivetrain.activation_budget(model, step, "40%")
    for one, other in zip(sizes(), expected, strict=True):
        assert_same_bits(one, other)


def test_batch_norm_counts_a_batch_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    x = torch.randn(4, 3, 9, 9)
    forget_all(model, lambda: model(x).sum().backward())
    before = int(model[1].num_batches_tracked)
    model(x).sum().backward()
    assert int(model[1].num_batches_tracked) == before + 1


def test_masks_are_kept_as_bits_without_loss() -> None:
    model, x, step = masks_and_more()
    expected = gradients(model, step)
    trace, _ = profile(model, step, [1])
    packable = {
        (index, write): form
        for index, op in enumerate(trace.passes[0].ops)
        for write in op[4]
        for form in trace.passes[0].values[write][4]
    }
    assert {trace.passes[0].ops[index][0] for index, _ in packable} == {"aten::div_"}  # only dropout's masks
    assert len(packable) == 4
    assert all(form[0] == 1 and form[1] <= 256 * 64 * 4 / 31 for form in packable.values())
    recorder = _C.ActivationRecorder()
    masks = {write for _, write in packable}
    recorder.set_plans(
        [[PlannedOp(op[0], [1 if write in masks else -2 for write in op[4]], False) for op in trace.passes[0].ops]]
    )
    with Recording(model, recorder):
        model(x)
        recorder.reset()
        assert_same_bits(gradients(model, step), expected)
    whole = sum(value[0] for value in trace.passes[0].values if value[4])
    assert recorder.peak_bytes < 12 * 256 * 64 * 4 - 0.9 * whole
    assert recorder.live_bytes == 0


@pytest.mark.parametrize("lossy", ["bfloat16", "int8"])
def test_a_lossy_form_is_close(lossy: str) -> None:
    model, _, step = masks_and_more()
    expected = gradients(model, step)
    plan = drivetrain.activation_budget(model, step, "60%", lossy=lossy)
    # Nothing is recomputed: every saved tensor is in that storage format.
    trace = plan._trace.passes[0]
    code = {"bfloat16": 2, "int8": 3}[lossy]
    plan._recorder.set_plans(
        [[PlannedOp(op[0], [code if trace.values[w][4] else -2 for w in op[4]], False) for op in trace.ops]]
    )
    plan.reset_peak()
    found = gradients(model, step)
    assert plan.peak_bytes <= (0.6 if lossy == "bfloat16" else 0.4) * plan.unplanned_bytes
    for name, value in expected.items():
        assert not torch.equal(found[name], value) or name.startswith("9.") or value.numel() == 0, name
        assert (found[name] - value).norm() <= 0.02 * value.norm(), name
    assert any(row["packed_bytes"] for row in plan.blocks())


def test_tensors_that_wait_on_the_host() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())])
    x = torch.randn(256, 128)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    expected = gradients(model, step)
    plan = drivetrain.activation_budget(model, step, "60%", offload="64MiB")
    trace = plan._trace.passes[0]
    plan._recorder.set_plans(
        [[PlannedOp(op[0], [4 if trace.values[w][4] else -2 for w in op[4]], False) for op in trace.ops]]
    )
    copies = plan._pool.num_copies
    plan.reset_peak()
    loss = model(x).square().mean()
    assert plan.live_bytes <= 256 * 128 * 4  # of the last tensor, which no later operation reads
    assert plan._pool.bytes_in_use >= 10 * 256 * 128 * 4
    model.zero_grad()
    loss.backward()
    assert plan._pool.num_copies > copies + 20  # out and back
    assert plan._pool.bytes_in_use == 0
    assert plan.live_bytes == 0
    assert plan.peak_bytes <= plan.budget_bytes
    assert_same_bits({name: param.grad for name, param in model.named_parameters()}, expected)
    saved = plan.to_dict()
    plan.remove()
    with pytest.raises(ValueError, match="plan offloads to the host: pass offload="):
        drivetrain.activation_budget(model, plan=saved)
    again = drivetrain.activation_budget(model, plan=saved, offload="64MiB")
    assert_same_bits(gradients(model, step), expected)
    again.remove()
    with pytest.raises(ValueError, match="lossy is 'fp4'"):
        drivetrain.activation_budget(model, step, "50%", lossy="fp4")
    with pytest.raises(ValueError, match="offload is 'much'"):
        drivetrain.activation_budget(model, step, "50%", offload="much")


@ABOVE
def test_noted_only_operations_are_kept_when_steps_part_again(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    expected = gradients(model, step)
    plan = drivetrain.activation_budget(model, step, "80%")
    # No operation's arguments are known, so nothing can be recomputed under any plan.
    names = [op[0] for op in plan._trace.passes[0].ops]
    plan._recorder.set_plans(
        [[PlannedOp(name, [-1] * len(op[4]), False) for name, op in zip(names, plan._trace.passes[0].ops, strict=True)]]
    )
    assert_same_bits(gradients(model, step), expected)


def test_statistics_and_buffers_that_are_read_and_then_written() -> None:
    torch.manual_seed(0)

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
            self.embed = nn.Embedding(5, 16, max_norm=1.0)
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            x = self.spectral(x)
            y = (x - self.mean).sin() * (x - self.norm.running_mean).exp()
            self.mean.lerp_(x.detach().mean(0), 0.1)
            z = self.norm(y).tanh() + (self.mean + x).cos()
            z = z + self.embed(torch.tensor([1, 2, 3, 1])).sin() + self.embed(torch.tensor([2, 4, 0, 0])).exp()
            return z.square().sum()

    def two_passes(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(1)
        x = [torch.randn(4, 16) for _ in range(3)]
        model.zero_grad()
        model.eval()
        first = model(x[0])
        model.train()
        (first + model(x[1]) + model(x[2])).backward()
        found = {name: param.grad.clone() for name, param in model.named_parameters()}
        return found | {name: value.clone() for name, value in model.named_buffers()}

    model = Running()
    state = copy.deepcopy(model.state_dict())
    expected = two_passes(model)
    model.load_state_dict(state)
    forget_all(model, lambda: two_passes(model))
    model.load_state_dict(state)
    assert_same_bits(two_passes(model), expected)


def test_statistics_that_are_updated_by_what_is_not_replayed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))
    state = copy.deepcopy(model.state_dict())
    xs = torch.randn(32, 16), 2 * torch.randn(32, 16) + 1

    def step() -> None:
        model.zero_grad()
        waiting = model.eval()(xs[0])
        (waiting.square().sum() + model.train()(xs[1]).square().sum()).backward()

    expected = gradients(model, step)
    trace, _ = profile(model, step)
    waits, updates = trace.passes
    policy = [
        RECOMPUTE if one is waits and value[2] and value[0] > 64 * 4 else SAVE
        for one in trace.passes
        for value in one.values
    ]
    recorder = _C.ActivationRecorder()
    recorder.set_plans(ChosenPolicy(policy, 0, 0.0, 0.0, 0, True).tape_plans(trace))
    assert "aten::native_batch_norm" in [op[0] for op in updates.ops]
    model.load_state_dict(state)
    with Recording(model, recorder):
        assert_same_bits(gradients(model, step), expected)
    assert recorder.num_replayed > 0


@pytest.fixture
def _deterministic_cudnn() -> Iterator[None]:
    """Sets the flag through torch's context manager, because `torch.testing._internal.common_utils`, which other tests
    import, forbids other ways."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield


@pytest.mark.usefixtures("_deterministic_cudnn")
def test_cudnns_flags_can_be_set_beside_torchs_own_tests() -> None:
    importlib.import_module("torch.testing._internal.common_utils")
    assert torch.backends.cudnn.deterministic


@pytest.mark.gpu
@pytest.mark.usefixtures("_deterministic_cudnn")
@pytest.mark.parametrize("offload", [None, "1GiB"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "encoder-decoder", "custom function", "shared"])
def test_bits_and_bytes_on_a_gpu(name: str, offload: str | None) -> None:
    """Compares bits with everything recomputed and within a budget, and the plan's bytes with the allocator's."""

    def on_gpu() -> Run:
        run = Run(name)
        run.model.cuda()
        run.inputs = run.inputs.detach().cuda().requires_grad_(run.inputs.is_floating_point())
        return run

    expected = on_gpu().result()
    run = on_gpu()
    installed, recorder = forget_all(run.model, run.step)
    run.model.zero_grad()
    run.inputs.grad = None
    assert_same_bits(run.result(), expected)
    assert recorder.num_replayed > 0
    assert recorder.live_bytes == 0
    installed.__exit__()
    run, fresh = on_gpu(), on_gpu()
    plan = drivetrain.activation_budget(run.model, run.step, "80%", offload=offload)
    run.model.load_state_dict(fresh.model.state_dict())
    run.model.zero_grad()
    run.inputs.grad = None
    before = torch.cuda.memory_allocated()
    loss = run.model(run.inputs)
    kept = plan.live_bytes
    assert torch.cuda.memory_allocated() - before >= 0.9 * kept
    del loss
    run.model.load_state_dict(fresh.model.state_dict())
    plan.reset_peak()
    assert_same_bits(run.result(), expected)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.live_bytes == 0


def test_a_replay_has_the_switches_of_its_forward() -> None:
    """oneDNN and torch's own kernels sum in another order."""
    torch.manual_seed(0)
    layers = [nn.Linear(6400, 512), nn.GELU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.GELU()]
    model, x = nn.Sequential(*layers, nn.Linear(512, 8)), torch.randn(8, 6400)

    def step() -> None:
        model.zero_grad()
        torch._C._set_mkldnn_enabled(False)
        try:
            loss = model(x).square().mean()
        finally:
            torch._C._set_mkldnn_enabled(True)
        loss.backward()
        assert torch._C._get_mkldnn_enabled()

    expected = gradients(model, step)
    plan = drivetrain.activation_budget(model, lambda: model(x).square().mean().backward(), "60%")
    assert_same_bits(gradients(model, step), expected)
    plan.remove()
