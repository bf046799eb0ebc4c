"""Tests main gradients against sums in plain torch: bits, layouts, hooks, writes to .grad, DDP and optimizers."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import drivetrain
from ddp_cases import SMALL_BUCKETS, Tied, TorchDDP, assert_equal_on_ranks, message_of
from drivetrain import DistributedDataParallel as DDP
from effort import rounds
from ranks import run_on
from reference.formats import accumulated as added

HALVES = [torch.bfloat16, torch.float16]
BITS = [(torch.bfloat16, 32), (torch.float16, 32), (torch.bfloat16, 24)]
on_devices = pytest.mark.usefixtures("device")
# The sizes range from 0 elements to several threads' pieces, and are not multiples of a vector.
SHAPES = [(), (0,), (1,), (3, 5), (513,), (7, 1283), (131, 1009)]


class Holder(nn.Module):
    """Holds one parameter, whose gradient is the tensor that `send` multiplies it with."""

    def __init__(self, param: Tensor) -> None:
        super().__init__()
        self.param = nn.Parameter(param)

    def send(self, grad: Tensor) -> None:
        (self.param * grad).sum().backward()


def awkward(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Returns values of many magnitudes, and for large shapes also infinity, -0 and NaN."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=rng) * 10.0 ** torch.randint(-6, 4, shape, generator=rng)
    if values.numel() > 400:
        values.view(-1)[[7, 100, 301]] = torch.tensor([torch.inf, -0.0, torch.nan])
    return values.to(dtype)


def assert_bits(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fuses", [False, True])
def test_a_parameter_frozen_before_backward_gets_no_gradient(fuses: bool) -> None:
    """Scripts of GANs freeze the critic before the generator's backward pass."""
    critic = nn.Linear(4, 1).bfloat16()
    drivetrain.main_grads(critic)
    if fuses:
        drivetrain.fuse_wgrad(critic)
    made = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = critic(made).sum()
    critic.requires_grad_(False)
    loss.backward()
    assert made.grad is not None
    assert [param.grad for param in critic.parameters()] == [None, None]
    critic.requires_grad_(True)
    critic(made).sum().backward()
    assert_bits(critic.weight.grad, torch.full((1, 4), 2.0))


@pytest.mark.parametrize(("dtype", "bits"), BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_the_sum(shape: tuple[int, ...], dtype: torch.dtype, bits: int, isa: str) -> None:
    model = Holder(torch.ones(shape, dtype=dtype))
    drivetrain.main_grads(model, bits)
    total = torch.zeros(shape)
    for k in range(4):
        micro = awkward(shape, dtype, seed=k)
        total = micro.float() if k == 0 else added(total, micro, bits)
        model.send(micro)
        assert_bits(drivetrain.float32_grad(model.param), total)
        assert model.param.grad is model.param.main_grad
        assert model.param.grad.dtype == (torch.float32 if bits == 32 else torch.bfloat16)
    # The sum starts again after zero_grad().
    model.zero_grad()
    model.send(awkward(shape, dtype, seed=9))
    assert_bits(drivetrain.float32_grad(model.param), awkward(shape, dtype, seed=9).float())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bits"), BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_gives_the_cpus_bits(shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> None:
    models = [Holder(torch.ones(shape, dtype=dtype, device=device)) for device in ("cpu", "cuda")]
    for model in models:
        drivetrain.main_grads(model, bits)
    for k in range(4):
        for model in models:
            model.send(awkward(shape, dtype, seed=k).to(model.param.device))
        on_cpu, on_gpu = (drivetrain.float32_grad(model.param) for model in models)
        assert_bits(on_gpu.cpu(), on_cpu)


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40), bits=st.sampled_from([32, 24]))
@settings(max_examples=rounds(50, whole=200), deadline=None)
def test_any_sequence_of_values(values: list[float], bits: int) -> None:
    model = Holder(torch.ones(1, dtype=torch.bfloat16))
    drivetrain.main_grads(model, bits)
    micros = torch.tensor(values).bfloat16()
    total = micros[:1].float()
    for k, micro in enumerate(micros):
        total = total if k == 0 else added(total, micro[None], bits)
        model.send(micro[None])
    assert_bits(drivetrain.float32_grad(model.param), total)


def test_error_after_64_micro_steps() -> None:
    model = Holder(torch.ones(4096, dtype=torch.bfloat16))
    exact, errors = torch.zeros(4096, dtype=torch.float64), {}
    micros = [torch.randn(4096).bfloat16() for _ in range(64)]
    for micro in micros:
        exact += micro.double()
    for bits in (16, 24, 32):
        model = Holder(torch.ones(4096, dtype=torch.bfloat16))
        if bits > 16:
            drivetrain.main_grads(model, bits)
        for micro in micros:
            model.send(micro)
        errors[bits] = float((drivetrain.float32_grad(model.param).double() - exact).norm() / exact.norm())
    assert errors[32] < 1e-7
    assert errors[24] < 1e-4 < 30 * errors[24] < errors[16]


@on_devices
@pytest.mark.parametrize(("dtype", "bits"), BITS)
def test_layouts(dtype: torch.dtype, bits: int) -> None:
    """Covers transposed, strided and expanded parameters, and such gradients from autograd."""
    memory = torch.ones(12, 10, dtype=dtype)
    for param in (memory.t(), memory[:, ::2], memory.expand(2, 12, 10)[0], torch.ones(2, 3, 4, 5, dtype=dtype)):
        model = Holder(param.detach())
        model.param.data = param.detach()
        if param.dim() == 4:
            model.param.data = param.contiguous(memory_format=torch.channels_last)
        drivetrain.main_grads(model, bits)
        micros = [
            torch.randn(param.shape).to(dtype),
            torch.randn(param.shape[::-1]).to(dtype).permute(*range(param.dim() - 1, -1, -1)),
            torch.randn(1).to(dtype).expand(param.shape),
        ]
        total = torch.zeros(param.shape)
        for k, micro in enumerate(micros):
            total = micro.float().clone() if k == 0 else added(total, micro, bits)
            model.send(micro)
        assert_bits(drivetrain.float32_grad(model.param), total)


def test_other_parameters_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).bfloat16())
    model[2].requires_grad_(False)
    drivetrain.main_grads(model)
    assert [hasattr(param, "main_grad") for param in model.parameters()] == [False, False, True, True, False, False]
    with pytest.raises(ValueError, match=r"param is a tensor of shape \(3, 3\) without a gradient"):
        drivetrain.float32_grad(model[0].weight)
    (model[0].weight.sum() * 3).backward()
    assert_bits(drivetrain.float32_grad(model[0].weight), torch.full((3, 3), 3.0))


# ---- Other writers of .grad.


@on_devices
@pytest.mark.parametrize("bits", [32, 24])
def test_hooks_see_and_change_what_they_should(bits: int) -> None:
    model = Holder(torch.ones(5, dtype=torch.bfloat16))
    early: list[Tensor] = []
    late: list[Tensor] = []
    model.param.register_hook(lambda grad: early.append(grad.clone()))
    drivetrain.main_grads(model, bits)
    model.param.register_hook(lambda grad: grad * 2)
    model.param.register_post_accumulate_grad_hook(lambda param: late.append(param.grad.clone()))
    model.send(torch.full((5,), 3.0).bfloat16())
    model.send(torch.full((5,), 4.0).bfloat16())
    assert [grad[0].item() for grad in early] == [3.0, 4.0]
    assert [grad[0].item() for grad in late] == [6.0, 14.0]


@on_devices
def test_who_writes_the_gradient_drops_the_residual() -> None:
    micro = torch.full((600,), 1 + 2.0**-7).bfloat16()
    small = torch.full((600,), 2.0**-9).bfloat16()
    model = Holder(torch.ones(600, dtype=torch.bfloat16))
    drivetrain.main_grads(model, 24)
    model.send(micro)
    model.send(small)
    assert drivetrain.float32_grad(model.param)[0] == 1 + 2.0**-7 + 2.0**-9
    assert model.param.grad[0].item() == 1 + 2.0**-7
    half = model.param.grad[0].item()
    model.param.grad.mul_(2)
    assert drivetrain.float32_grad(model.param)[0] == 2 * half
    model.send(small)
    assert drivetrain.float32_grad(model.param)[0] == 2 * half + 2.0**-9
    model.zero_grad(set_to_none=False)
    model.send(small)
    assert_bits(drivetrain.float32_grad(model.param), small.float())
    # autograd adds to another tensor in .grad.
    model.param.grad = torch.ones(600).bfloat16()
    model.send(small)
    assert drivetrain.float32_grad(model.param)[0] == 1 + 2.0**-9
    model.zero_grad()
    model.send(small)
    assert_bits(drivetrain.float32_grad(model.param), small.float())


def test_gradients_of_gradients_are_autograds() -> None:
    model = Holder(torch.full((4,), 2.0, dtype=torch.bfloat16))
    drivetrain.main_grads(model)
    with pytest.warns(UserWarning, match="create_graph=True"):
        (model.param**3).sum().backward(create_graph=True)
    assert model.param.grad.requires_grad
    assert_bits(model.param.grad.detach(), torch.full((4,), 12.0))
    (second,) = torch.autograd.grad(model.param.grad.sum(), model.param)
    assert_bits(second.float(), torch.full((4,), 12.0))
    model.zero_grad()
    model.send(torch.ones(4).bfloat16())
    assert_bits(model.param.grad, torch.ones(4))


def test_sparse_gradients_are_autograds() -> None:
    words = nn.Embedding(10, 4, sparse=True).bfloat16()
    drivetrain.main_grads(words)
    for _ in range(2):
        words(torch.tensor([1, 1, 3])).sum().backward()
    assert words.weight.grad.layout == torch.sparse_coo
    assert words.weight.grad.dtype == torch.float32
    assert_bits(words.weight.grad.to_dense()[1], torch.full((4,), 4.0))


class CheckpointedTied(Tied):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.middle, self.embed(x), use_reentrant=False).relu())


@pytest.mark.parametrize("bits", [32, 24])
def test_tied_weights_and_checkpointing(bits: int) -> None:
    model = CheckpointedTied().bfloat16()
    reference = copy.deepcopy(model)
    drivetrain.main_grads(model, bits)
    totals = [torch.zeros(param.shape) for param in reference.parameters()]
    for k in range(3):
        x = torch.randint(11, (6,))
        model(x).float().square().mean().backward()
        reference.zero_grad()
        reference(x).float().square().mean().backward()
        for i, param in enumerate(reference.parameters()):
            totals[i] = param.grad.float() if k == 0 else added(totals[i], param.grad, bits)
    for param, total in zip(model.parameters(), totals, strict=True):
        assert_bits(drivetrain.float32_grad(param), total)


class AddsItself(torch.autograd.Function):
    """Adds the weight's gradient to main_grad, as Megatron-LM's linear layer does, and returns a dummy to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        weight.main_grad += grad.float().t() @ x.float()
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan)


@on_devices
def test_layers_that_add_to_the_main_gradient() -> None:
    model = nn.Linear(6, 4, bias=False).bfloat16()
    drivetrain.main_grads(model)
    expected = torch.zeros(4, 6)
    for _ in range(3):
        x, sent = torch.randn(5, 6).bfloat16(), torch.randn(5, 4).bfloat16()
        AddsItself.apply(x, model.weight).backward(sent)
        expected += sent.float().t() @ x.float()
    assert model.weight.grad is model.weight.main_grad
    assert not model.weight.grad_added_to_main_grad
    torch.testing.assert_close(model.weight.grad, expected)


def test_models_are_freed_and_copied() -> None:
    model = Holder(torch.ones(5, dtype=torch.bfloat16))
    drivetrain.main_grads(model)
    reference = copy.deepcopy(model)
    reference.send(torch.ones(5).bfloat16())
    assert reference.param.grad.dtype == torch.bfloat16
    drivetrain.main_grads(copy.deepcopy(model))
    param, graph = weakref.ref(model.param), (model.param * 2).sum()
    del model
    gc.collect()
    graph.backward()  # a graph that outlives the model
    del graph
    gc.collect()
    assert param() is None


def test_bad_arguments() -> None:
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(ValueError, match="bits is 16, expected 32 or 24"):
        drivetrain.main_grads(model, 16)
    with pytest.raises(ValueError, match="no bfloat16 or float16 parameter"):
        drivetrain.main_grads(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"bits is 24 and parameter 'weight' is torch.float16.*use 32"):
        drivetrain.main_grads(nn.Linear(2, 2).half(), 24)
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(ValueError, match="parameter 'weight' has a gradient already"):
        drivetrain.main_grads(model)
    model.zero_grad()
    drivetrain.main_grads(model)
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' has a main gradient already"):
        drivetrain.main_grads(nn.ModuleList([model]))


# ---- Optimizers and windows.


@on_devices
@pytest.mark.parametrize("bits", [32, 24])
@pytest.mark.parametrize("zero_grads_in_step", [False, True])
def test_steps_and_windows(bits: int, zero_grads_in_step: bool) -> None:
    """Compares a bfloat16 model with a copy of it whose micro-gradients are summed in plain torch."""
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2)).bfloat16()
    reference = copy.deepcopy(model)
    drivetrain.main_grads(model, bits)
    options: dict[str, Any] = {"lr": 0.01, "max_grad_norm": 0.5, "master_bits": 32, "state_bits": 32}
    ours = drivetrain.optim.AdamW(model.parameters(), zero_grads_in_step=zero_grads_in_step, **options)
    plain = drivetrain.optim.AdamW(reference.parameters(), **options)
    for _ in range(3):
        batches = [torch.randn(5, 7).bfloat16() for _ in range(4)]
        with drivetrain.accumulate(model, ours, steps=4) as window:
            for x in batches:
                window.backward(model(x).float().square().mean(), weight=4)
        totals = [torch.zeros(param.shape) for param in reference.parameters()]
        for k, x in enumerate(batches):
            reference.zero_grad()
            (reference(x).float().square().mean() * 4).backward()
            for i, param in enumerate(reference.parameters()):
                totals[i] = param.grad.float() if k == 0 else added(totals[i], param.grad, bits)
        for param, total in zip(reference.parameters(), totals, strict=True):
            param.grad = None
            if bits == 32:
                param.grad_dtype = torch.float32
            param.grad = total if bits == 32 else total.bfloat16()
        plain.grad_scale = 16.0
        plain.step()
        for param in reference.parameters():
            param.grad = None
            param.grad_dtype = torch.bfloat16
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            if bits == 32:
                assert_bits(ours.float32_value(param), plain.float32_value(expected))
            else:  # torch rounds ties to even, and drivetrain away from zero.
                torch.testing.assert_close(param, expected, rtol=2**-7, atol=1e-3)


# ---- Ranks.


def summed(model: nn.Module, batches: list[Tensor], bits: int) -> list[Tensor]:
    """Returns this rank's own main gradients, computed on a copy of the model."""
    reference = copy.deepcopy(model)
    drivetrain.main_grads(reference, bits)
    for x in batches:
        reference(x).float().square().mean().backward()
    return [drivetrain.float32_grad(param) if bits == 32 else param.grad for param in reference.parameters()]


@pytest.mark.parametrize("transport", ["auto", "torch"])
@pytest.mark.parametrize("bits", [32, 24])
@run_on(2)
def test_reduced_where_they_lie(bits: int, transport: str) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(10, 37), nn.Tanh(), nn.Linear(37, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
    drivetrain.main_grads(net, bits)
    model = DDP(net, transport=transport)  # It plans its buckets again twice.
    dtype = torch.float32 if bits == 32 else torch.bfloat16
    torch.manual_seed(dist.get_rank())
    for step in range(7):
        batches = [torch.randn(6, 10).bfloat16() for _ in range(3)]
        expected = summed(net, batches, bits)
        for grad in expected:
            total = grad.float()
            dist.all_reduce(total)
            grad.copy_(total / 2)
        with model.no_sync():
            for x in batches[:-1]:
                model(x).float().square().mean().backward()
        model(batches[-1]).float().square().mean().backward()
        for (name, param), want in zip(net.named_parameters(), expected, strict=True):
            assert param.grad.dtype == dtype, name
            # (a + b) / 2 in bfloat16 rounds once or twice, depending on the transport.
            torch.testing.assert_close(param.grad, want, rtol=1e-6 if bits == 32 else 2**-7, atol=1e-6)
            assert param.grad is param.main_grad, (step, name)
        assert_equal_on_ranks([param.grad for param in net.parameters()])
        places = model.reducer.gradient_views()
        assert all(param.main_grad is place for param, place in zip(net.parameters(), places, strict=True))
        del places, param  # References to gradients keep the buckets from changing.
        if step % 2:
            model.zero_grad()
        else:
            model.zero_grad(set_to_none=False)
    assert model.bucket_plan().why_not == "", model.bucket_plan()


@pytest.mark.parametrize("bits", [32, 24])
@run_on(2)
def test_windows_on_ranks(bits: int) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(10, 37), nn.Tanh(), nn.Linear(37, 3)).bfloat16()
    drivetrain.main_grads(net, bits)
    model = DDP(net, **SMALL_BUCKETS)
    optimizer = drivetrain.optim.AdamW(model.parameters(), lr=0.01, master_bits=24, state_bits=8)
    before = [param.detach().clone() for param in net.parameters()]
    rank = dist.get_rank()
    with drivetrain.accumulate(model, optimizer, steps=3) as window:
        for k in range(5 + 4 * rank):
            window.backward(model(torch.randn(4, 10).bfloat16()).float().square().mean(), weight=k + rank)
    assert_equal_on_ranks(list(net.parameters()))
    assert all(not torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))


@run_on(2)
def test_wrapped_too_early() -> None:
    model = nn.Linear(2, 2).bfloat16()
    for wrapper in (DDP, TorchDDP):
        message = message_of(RuntimeError, lambda wrapper=wrapper: drivetrain.main_grads(wrapper(model)))
        assert "before wrapping" in message
    only_here = nn.Linear(2, 2).bfloat16()
    if dist.get_rank() == 0:
        drivetrain.main_grads(only_here)
    message = message_of(RuntimeError, lambda: DDP(only_here))
    facts = "(2, 2) torch.bfloat16, strides (2, 1)"
    assert f"parameter 'weight' differs: rank 0: {facts}, gradient torch.float32; rank 1: {facts}." in message
