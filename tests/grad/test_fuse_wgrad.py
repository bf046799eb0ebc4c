"""Tests linear layers that add their weight's gradient directly to `.grad`, against torch's own layers.

Most of the data are small integers, whose products have exact sums. The tests can therefore ask for equality in any
order of summation.
"""

import copy
import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import drivetrain
from ddp_cases import SMALL_BUCKETS, Tied, TorchDDP, assert_equal_on_ranks
from drivetrain import _C
from drivetrain import DistributedDataParallel as DDP
from drivetrain.grad.fuse_wgrad import Linear
from ranks import run_on
from reference.formats import accumulated as added

# Only block products sum products of bfloat16 values in float32 on the CPU.
needs_block_products = pytest.mark.skipif(
    not _C.has_block_products(), reason="this processor has no block products of bfloat16, which take AVX-512"
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Each row has the input features, the output features and the inputs' leading dimensions. The rows cover no tokens, one
# token, tails of blocks, and several blocks and sums.
SHAPES = [
    (3, 5, (4,)),
    (1, 1, (1,)),
    (7, 9, ()),
    (8, 16, (2, 0)),
    (64, 64, (32,)),
    (70, 131, (3, 11)),
    (200, 65, (513,)),
    (33, 300, (2, 520)),
]


def small(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).float()


def layer(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(small(*param.shape))
    return made


def fused(module: nn.Module) -> nn.Module:
    result = copy.deepcopy(module)
    drivetrain.fuse_wgrad(result)
    return result


def wgrad(sent: Tensor, x: Tensor) -> Tensor:
    """Returns the weight's gradient, float32 [outputs, inputs]."""
    return sent.reshape(-1, sent.shape[-1]).float().t() @ x.detach().reshape(-1, x.shape[-1]).float()


def is_fused(output: Tensor) -> bool:
    """Returns whether our function made the output, not torch's (AddmmBackward0)."""
    return type(output.grad_fn).__name__ == "CppFunction"


def assert_same_grads(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, param), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), name
        if param.grad is not None:
            assert param.grad.dtype == expected.grad.dtype, name
            assert torch.equal(param.grad, expected.grad), name


# ---- Values.


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs", "leading"), SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_as_torch(dtype: torch.dtype, inputs: int, outputs: int, leading: tuple[int, ...], bias: bool) -> None:
    theirs = layer(inputs, outputs, bias).to(dtype)
    ours = fused(theirs)
    for _ in range(3):
        batch, sent = small(*leading, inputs).to(dtype), small(*leading, outputs).to(dtype)
        brought = []
        for model in (ours, theirs):
            x = batch.clone().requires_grad_()
            y = model(x)
            y.backward(sent)
            brought.append((y, x.grad))
        assert is_fused(brought[0][0])
        assert torch.equal(brought[0][0], brought[1][0])
        assert torch.equal(brought[0][1], brought[1][1])
        if dtype in (torch.float64, torch.float32):
            assert_same_grads(ours, theirs)
        else:  # a sum of 3 gradients, theirs rounded twice as often
            difference, size = (ours.weight.grad - theirs.weight.grad).float().norm(), theirs.weight.grad.float().norm()
            assert difference <= 2**-7 * size


@pytest.mark.parametrize(("inputs", "outputs", "leading"), SHAPES)
@pytest.mark.parametrize("bits", [32, 24])
def test_into_main_gradients(inputs: int, outputs: int, leading: tuple[int, ...], bits: int, device: str) -> None:
    """The CPU sums products of bfloat16 in float32, 512 tokens at a time, and adds each sum as a micro-gradient.

    24 bits on CUDA take autograd's product, which is rounded to bfloat16, because a float32 product moves twice its
    bytes. Processors without block products take autograd's product, too.
    """

    is_exact = _C.has_block_products() if device == "cpu" else bits == 32

    def product_of(sent: Tensor, x: Tensor) -> Tensor:
        product = wgrad(sent, x)
        return product if is_exact else product.bfloat16().float()

    model = layer(inputs, outputs).bfloat16()
    drivetrain.fuse_wgrad(model)
    drivetrain.main_grads(model, bits)
    total = torch.zeros(outputs, inputs)
    for step in range(4):
        # Large gradients follow small ones, so that 24 bits round.
        scale = 2.0 ** (9 * (step % 2))
        x, sent = small(*leading, inputs).bfloat16(), (small(*leading, outputs) * scale).bfloat16()
        model(x).backward(sent)
        of_x, of_sent = x.reshape(-1, inputs), sent.reshape(-1, outputs)
        most = 512 if device == "cpu" and is_exact else max(len(of_x), 1)
        pieces = zip(of_x.split(most), of_sent.split(most), strict=True)
        for piece, (of_x, of_sent) in enumerate(pieces):
            product = product_of(of_sent, of_x)
            total = product if step == piece == 0 else added(total, product, bits)
        assert torch.equal(drivetrain.float32_grad(model.weight), total), step
        assert model.weight.grad is model.weight.main_grad
    model.zero_grad()
    x, sent = small(*leading, inputs).bfloat16(), small(*leading, outputs).bfloat16()
    model(x).backward(sent)
    assert torch.equal(drivetrain.float32_grad(model.weight), product_of(sent, x))


@needs_block_products
@given(st.integers(1, 150), st.integers(1, 150), st.lists(st.integers(0, 700), min_size=1, max_size=3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_shape(inputs: int, outputs: int, tokens: list[int], is_autocast: bool) -> None:
    """Main gradients and autocast both sum products of bfloat16 in float32."""
    model = layer(inputs, outputs)
    if not is_autocast:
        model = model.bfloat16()
        drivetrain.main_grads(model)
    drivetrain.fuse_wgrad(model)
    total = torch.zeros(outputs, inputs)
    for count in tokens:
        x, sent = small(count, inputs), small(count, outputs).bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            y = model(x if is_autocast else x.bfloat16())
        y.backward(sent)
        total += wgrad(sent, x)
    assert torch.equal(model.weight.grad, total)


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(0, 4), (6, 0), (0, 0)])
def test_layers_of_no_size(sizes: tuple[int, int]) -> None:
    theirs = nn.Linear(*sizes) if sizes[0] else nn.Linear(1, sizes[1])
    theirs.weight = nn.Parameter(torch.zeros(sizes[1], sizes[0]))
    ours = fused(theirs)
    for model in (ours, theirs):
        for _ in range(2):
            model(torch.ones(5, sizes[0], requires_grad=True)).sum().backward()
    assert_same_grads(ours, theirs)


def test_complex_layers() -> None:
    theirs = nn.Linear(6, 4, dtype=torch.complex64)
    ours = fused(theirs)
    for _ in range(2):
        batch = torch.randn(5, 6, dtype=torch.complex64)
        for model in (ours, theirs):
            model(batch).abs().sum().backward()
    assert_same_grads(ours, theirs)


@needs_block_products
def test_nearer_to_the_truth_than_rounded_products() -> None:
    model = nn.Linear(96, 80).bfloat16()
    ours = fused(model)
    for each in (model, ours):
        drivetrain.main_grads(each)
    exact = torch.zeros(80, 96, dtype=torch.float64)
    for _ in range(8):
        x, sent = torch.randn(100, 96).bfloat16(), torch.randn(100, 80).bfloat16()
        exact += sent.double().t() @ x.double()
        for each in (model, ours):
            each(x).backward(sent)
    error, rounded = [float((each.weight.grad.double() - exact).norm() / exact.norm()) for each in (ours, model)]
    assert error < 1e-6 < 1e-3 < rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv1d(dtype: torch.dtype) -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    theirs = pytorch_utils.Conv1D(35, 70)
    with torch.no_grad():
        for param in theirs.parameters():
            param.copy_(small(*param.shape))
    theirs = theirs.to(dtype)
    ours = fused(theirs)
    drivetrain.fuse_wgrad(ours)  # A second call does nothing.
    assert isinstance(ours, pytorch_utils.Conv1D)
    if dtype == torch.bfloat16:
        drivetrain.main_grads(ours)
    total = torch.zeros(70, 35)
    for _ in range(3):
        x, sent = small(2, 17, 70).to(dtype), small(2, 17, 35).to(dtype)
        assert torch.equal(ours(x), theirs(x))
        ours(x).backward(sent)
        total += wgrad(x, sent)
    assert torch.equal(ours.weight.grad.float(), total)


# ---- No allocation of the weight's size.


@pytest.mark.parametrize(
    "kind",
    ["float32", *(pytest.param(kind, marks=needs_block_products) for kind in ("main 32", "main 24", "autocast"))],
)
def test_no_gradient_beside(kind: str) -> None:
    """Checks the allocations of backward with the profiler."""
    model = nn.Linear(1024, 2048, bias=False)
    if kind.startswith("main"):
        model = model.bfloat16()
        drivetrain.main_grads(model, int(kind[-2:]))
    drivetrain.fuse_wgrad(model)
    x = torch.randn(16, 1024, dtype=torch.float32 if kind == "autocast" else model.weight.dtype)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return model(x).float().square().mean()

    loss().backward()
    second = loss()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        second.backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < model.weight.numel(), "bytes, against elements"


# ---- Hooks, other calls of autograd, and frozen parameters.


def test_hooks_see_gradients() -> None:
    for register in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        theirs = layer(6, 4)
        ours = fused(theirs)
        seen: list[Tensor] = []

        def see(gradient_or_weight: Tensor, seen: list[Tensor] = seen) -> None:
            is_weight = gradient_or_weight.is_leaf and gradient_or_weight.requires_grad
            seen.append((gradient_or_weight.grad if is_weight else gradient_or_weight).clone())

        for model in (ours, theirs):
            register(model.weight, see)
        batches = [small(5, 6) for _ in range(3)]
        for model in (ours, theirs):
            for x in batches:
                model(x).square().sum().backward()
        assert len(seen) == 6
        assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
        assert_same_grads(ours, theirs)


def test_hooks_change_gradients() -> None:
    theirs = layer(6, 4)
    ours = fused(theirs)
    for model in (ours, theirs):
        model.weight.grad = torch.ones(4, 6)
        model.weight.register_hook(lambda grad: grad * 3)
        model(torch.ones(5, 6)).sum().backward()
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("has_main", [False, True])
def test_gradients_asked_for(has_main: bool) -> None:
    """torch.autograd.grad() and backward(inputs=) touch no other .grad."""
    theirs = nn.Sequential(layer(6, 4), layer(4, 3))
    ours = fused(theirs)
    if has_main:
        theirs, ours = theirs.bfloat16(), ours.bfloat16()
        drivetrain.main_grads(ours)
    x = small(5, 6).to(theirs[0].weight.dtype)
    for model in (ours, theirs):
        (model(x) * 0).sum().backward()  # The gradients are zeros.
    found = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for model in (ours, theirs)]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(*found, strict=True))
    assert not any(param.grad.count_nonzero() for param in ours.parameters())
    for model in (ours, theirs):
        model(x).sum().backward(inputs=[model[0].weight])
    for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad.to(param.grad.dtype))
    assert ours[0].weight.grad.count_nonzero() > 0 == ours[1].weight.grad.count_nonzero()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("is_autocast", [False, True])
def test_gradients_of_gradients(is_autocast: bool) -> None:
    theirs = nn.Sequential(layer(6, 4), nn.Tanh(), layer(4, 3))
    ours = fused(theirs)
    x = small(5, 6)
    for model in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = model(x).float().square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
    for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=0.02 if is_autocast else 1e-5, atol=1e-3)


def test_gradients_of_gradients_need_the_weight_of_the_forward() -> None:
    model = fused(layer(6, 4))
    x = small(5, 6).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    with torch.no_grad():
        model.weight.mul_(3)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation\. It is the weight of a linear layer"):
        torch.autograd.grad(y.float().sum(), x, create_graph=True)


def test_many_gradients_at_once() -> None:
    theirs = layer(6, 4)
    ours = fused(theirs)
    x, sent = small(5, 6), small(3, 5, 4)
    found = [torch.autograd.grad(model(x), model.weight, sent, is_grads_batched=True)[0] for model in (ours, theirs)]
    assert torch.equal(*found)
    assert ours.weight.grad is None


def test_versions_of_gradients() -> None:
    """Each addition increments the gradient's version counter, as torch's operations do."""
    model = fused(layer(6, 4))
    versions = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(small(5, 6))
        y.sum().backward()
        versions.append(model.weight.grad._version)
    assert versions[0] < versions[1] < versions[2]


def test_gradients_that_are_factors() -> None:
    theirs = layer(4, 4)
    ours = fused(theirs)
    for model in (ours, theirs):
        x = torch.ones(4, 4)
        model.weight.grad = x
        model(x).sum().backward()
    assert_same_grads(ours, theirs)


def test_gradcheck() -> None:
    model = fused(nn.Linear(3, 2).double())
    weight, bias, x = model.weight.detach(), model.bias.detach(), torch.randn(4, 3, dtype=torch.float64)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return drivetrain._C.fused_linear(x, weight, bias, is_conv1d=False)

    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_frozen_parts() -> None:
    for frozen in ("weight", "bias", "input", "all"):
        theirs = layer(6, 4)
        if frozen in ("weight", "bias"):
            getattr(theirs, frozen).requires_grad_(False)
        if frozen == "all":
            theirs.requires_grad_(False)
        ours = fused(theirs)
        for _ in range(2):
            batch = small(5, 6)
            for model in (ours, theirs):
                x = batch.clone().requires_grad_(frozen != "input")
                model(x).square().sum().backward()
            assert_same_grads(ours, theirs)
    with torch.no_grad():
        assert ours(batch).grad_fn is None
    with torch.inference_mode():
        assert torch.equal(ours(batch), theirs(batch))


def test_frozen_between_forward_and_backward() -> None:
    theirs = layer(6, 4)
    ours = fused(theirs)
    for model in (ours, theirs):
        x = small(5, 6).requires_grad_()
        y = model(x)
        model.weight.requires_grad_(False)
        y.sum().backward()
        assert model.weight.grad is None
        assert torch.equal(x.grad, torch.ones(5, 4) @ model.weight)
        assert torch.equal(model.bias.grad, torch.full((4,), 5.0))


def test_backward_twice_and_graphs_that_are_gone() -> None:
    theirs = layer(6, 4)
    ours = fused(theirs)
    x = small(5, 6)
    for model in (ours, theirs):
        y = model(x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
    assert_same_grads(ours, theirs)


def test_who_changes_what_was_saved() -> None:
    for change in ("x", "weight"):
        for model in (layer(6, 4), fused(layer(6, 4))):
            x = small(5, 6).requires_grad_()
            given = x * 1
            y = model(given)
            with torch.no_grad():
                (given if change == "x" else model.weight).add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_of_other_kinds_in_place() -> None:
    """Covers gradients in `.grad` that are transposed, strided or contiguous."""
    for grad in (torch.zeros(6, 4).t(), torch.zeros(8, 12)[::2, ::2], torch.zeros(4, 6)):
        theirs = layer(6, 4)
        ours = fused(theirs)
        for model in (ours, theirs):
            model.weight.grad = grad.clone(memory_format=torch.preserve_format)
            for _ in range(2):
                model(torch.ones(5, 6)).sum().backward()
        assert_same_grads(ours, theirs)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = layer(6, 6)
        self.second = layer(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + F.linear(x, self.first.weight)


@pytest.mark.parametrize("has_main", [False, True])
def test_shared_weights(has_main: bool) -> None:
    """Two layers and a plain use share one weight; a layer and an embedding share another one."""
    for theirs, batch in ((Shared(), small(5, 6)), (Tied(), torch.randint(11, (6,)))):
        with torch.no_grad():
            for param in theirs.parameters():
                param.copy_(small(*param.shape).sign())
        ours = fused(theirs)
        if has_main:
            ours = ours.bfloat16()
            drivetrain.main_grads(ours)
        for _ in range(2):
            sent = None
            for model in (ours, theirs):
                y = model(batch.to(model.second.weight.dtype) if isinstance(model, Shared) else batch)
                sent = small(*y.shape).sign() if sent is None else sent
                y.backward(sent.to(y.dtype))
        for param, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(param.grad.float(), expected.grad)


@pytest.mark.parametrize(
    "call",
    [
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=True),
        drivetrain.checkpoint,
        functools.partial(drivetrain.checkpoint, verify=True),
    ],
    ids=["torch", "reentrant", "ours", "verify"],
)
@pytest.mark.parametrize("is_autocast", [False, True])
def test_checkpointing(call: Callable[..., Tensor], is_autocast: bool) -> None:
    theirs = nn.Sequential(layer(6, 4), nn.ReLU(), layer(4, 3))
    ours = fused(theirs)
    for _ in range(3):
        batch = small(5, 6)
        for model in (ours, theirs):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                y = call(model, batch.clone().requires_grad_())
            y.float().sum().backward()
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_beside_other_uses(dtype: torch.dtype) -> None:
    """torch's functions use the cast weight that autocast caches in the same region, too."""
    theirs = layer(6, 4)
    ours = fused(theirs)
    for _ in range(2):
        x = small(5, 6)
        for model in (ours, theirs):
            with torch.autocast("cpu", dtype):
                y = model(x) + F.linear(x, model.weight) + model(x)
            assert y.dtype == dtype
            y.sum().backward()
    assert_same_grads(ours, theirs)


def test_weights_change_under_autocast() -> None:
    """A step between forward and backward is allowed, as with torch, because autocast copies the weight."""
    model = fused(layer(6, 4))
    x = small(5, 6).requires_grad_()
    weight = model.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    with torch.no_grad():
        model.weight.zero_()
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.ones(5, 4) @ weight)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_without_block_products() -> None:
    """autograd computes the gradient, as on a processor without block products of bfloat16."""
    theirs = layer(60, 40).bfloat16()
    ours = fused(theirs)
    for model in (ours, theirs):
        drivetrain.main_grads(model)
    with torch.backends.mkldnn.flags(enabled=False):
        for _ in range(3):
            x = small(5, 60).bfloat16()
            for model in (ours, theirs):
                model(x).sum().backward()
    assert_same_grads(ours, theirs)


def test_threads() -> None:
    """Several threads run backward into one weight at the same time."""
    for round in range(20):
        has_main = round % 2 == 0
        model = fused(layer(64, 48))
        if has_main:
            model = model.bfloat16()
            drivetrain.main_grads(model)
        dtype = model.weight.dtype

        def work(model: nn.Module = model, dtype: torch.dtype = dtype, plain: bool = not has_main) -> None:
            for _ in range(10):
                x = torch.ones(4, 64, dtype=dtype)
                (F.linear(x, model.weight) if plain else model(x)).sum().backward()
                model(x).sum().backward()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert torch.equal(model.weight.grad, torch.full((48, 64), 320.0))


# ---- Transforms, tracers, compilers and subclasses.


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_tracers_and_subclasses() -> None:
    theirs = layer(6, 4)
    ours = fused(theirs)
    x = small(3, 5, 6)
    params = {name: param.detach() for name, param in ours.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(ours, params, (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    for k in range(3):
        theirs.zero_grad()
        theirs(x[k]).square().sum().backward()
        assert torch.equal(per_sample["weight"][k], theirs.weight.grad)
    assert torch.equal(torch.func.vmap(ours)(x), theirs(x))
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.unpack_dual(
            ours(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        ).tangent
    assert torch.equal(tangent, torch.ones_like(x) @ theirs.weight.t())
    graph = torch.fx.symbolic_trace(nn.Sequential(ours))
    assert torch.equal(graph(x), theirs(x))
    assert is_fused(ours(x))  # Tracing has not changed the layer.


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    theirs = nn.Sequential(layer(6, 4), nn.ReLU(), layer(4, 3))
    ours = fused(theirs)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for _ in range(2):
        x = small(5, 6)
        compiled(x).sum().backward()
        theirs(x).sum().backward()
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("change", ["parametrize", "weight_norm", "prune"])
def test_computed_weights(change: str) -> None:
    """The gradient flows on to the parameters that the weight is computed from."""
    theirs = layer(6, 4)
    ours = fused(theirs)
    for model in (theirs, ours):
        torch.manual_seed(0)
        if change == "parametrize":
            parametrize.register_parametrization(model, "weight", nn.Softplus())
        elif change == "weight_norm":
            nn.utils.parametrizations.weight_norm(model)
        else:
            prune.random_unstructured(model, "weight", amount=0.5)
        for _ in range(2):
            y = model(torch.ones(5, 6))
            assert is_fused(y) == (model is ours)
            y.sum().backward()
    assert_same_grads(ours, theirs)


def test_copies_and_files() -> None:
    ours = fused(nn.Sequential(layer(6, 4)))
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for loaded in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert type(loaded[0]) is Linear
        assert torch.equal(loaded[0].weight, ours[0].weight)
    assert list(ours.state_dict()) == ["0.weight", "0.bias"]
    assert repr(ours[0]) == "Linear(in_features=6, out_features=4, bias=True)"


class Mine(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"the model, a Conv2d, has no torch\.nn\.Linear"):
        drivetrain.fuse_wgrad(nn.Conv2d(1, 1, 1))
    with pytest.raises(TypeError, match=r"model is a list, expected a torch\.nn\.Module"):
        drivetrain.fuse_wgrad([layer(2, 2)])
    with pytest.raises(ValueError, match="nothing to fuse"):
        drivetrain.fuse_wgrad(Mine(2, 2))
    model = fused(nn.Sequential(Mine(2, 2), layer(2, 2)))
    assert [type(module) for module in model] == [Mine, Linear]
    for x in (torch.ones(3, 5), torch.ones(3, 2, dtype=torch.float64), torch.tensor(1.0)):
        errors = []
        for each in (fused(layer(2, 2)), layer(2, 2)):
            with pytest.raises(RuntimeError) as caught:
                each(x)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


# ---- Windows, ranks, models.


def test_windows() -> None:
    """Windows of token means give the bits of one big batch."""
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(layer(6, 4)).to(dtype)
        if dtype == torch.bfloat16:
            drivetrain.main_grads(model)
        drivetrain.fuse_wgrad(model)
        optimizer = drivetrain.optim.SGD(model.parameters(), lr=0.0)
        seen: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_, seen=seen, model=model: seen.append(model[0].weight.grad.clone()))
        x = small(8, 6).to(dtype)
        with drivetrain.accumulate(model, optimizer, steps=4) as window:
            for part in x.split(2):
                window.backward(model(part).float().sum() / 2, weight=2)
        assert torch.equal(seen[0].float(), torch.ones(4, 8) @ x.float())


@pytest.mark.parametrize("has_main", [False, True])
@pytest.mark.parametrize(
    "options", [{}, SMALL_BUCKETS, {**SMALL_BUCKETS, "find_unused_parameters": True}, {"static_graph": True}]
)
@run_on(2)
def test_ranks(options: dict[str, Any], has_main: bool) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(layer(10, 37), nn.ReLU(), layer(37, 5, bias=False), layer(5, 3))
    with torch.no_grad():
        for param in net.parameters():
            param.sign_()
    # torch's own class does not support no_sync() with a static graph.
    theirs = TorchDDP(copy.deepcopy(net), **{**options, "static_graph": False})
    if has_main:
        net = net.bfloat16()
        drivetrain.main_grads(net)
    drivetrain.fuse_wgrad(net)
    ours = DDP(net, **options)  # It plans its buckets again where the options allow that.
    torch.manual_seed(dist.get_rank())
    for step in range(7):
        batches = [torch.randint(0, 2, (4, 10)).float() for _ in range(3)]
        for model in (ours, theirs):
            dtype = next(model.parameters()).dtype
            with model.no_sync():
                for x in batches[:-1]:
                    (model(x.to(dtype)).float() / 2).sum().backward()
            (model(batches[-1].to(dtype)).float() / 2).sum().backward()
        for (name, param), expected in zip(net.named_parameters(), theirs.module.parameters(), strict=True):
            assert torch.equal(param.grad.float(), expected.grad), (step, name)
        places = ours.reducer.gradient_views()
        assert all(param.grad is place for param, place in zip(net.parameters(), places, strict=True))
        del places, param
        for model in (ours, theirs):
            model.zero_grad(set_to_none=step % 2 == 0)
    assert_equal_on_ranks([param.detach() for param in net.parameters()])


@run_on(2)
def test_wrapped_by_torch() -> None:
    """torch's own DDP reduces the gradients of fused layers, too."""
    for options in ({}, {"gradient_as_bucket_view": True}):
        torch.manual_seed(1)
        net = nn.Sequential(layer(10, 37), nn.ReLU(), layer(37, 3))
        theirs, ours = TorchDDP(copy.deepcopy(net), **options), TorchDDP(fused(net), **options)
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            x = small(4, 10)
            for model in (ours, theirs):
                with model.no_sync():
                    model(x).sum().backward()
                model(x).sum().backward()
            assert_same_grads(ours, theirs)
            for model in (ours, theirs):
                model.zero_grad(set_to_none=step == 0)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_transformers(family: str) -> None:
    """Makes three steps of a small model in float32. The losses agree with those without fusion."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
        theirs = transformers.GPT2LMHeadModel(config)
    elif family == "llama":
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=48, **sizes))
    else:
        theirs = transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=48, **sizes))
    theirs.eval()  # no dropout
    ours = fused(theirs)
    losses: list[list[float]] = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses.append([])
        for _ in range(3):
            for tokens in torch.arange(36).view(2, 2, 9):
                loss = model(input_ids=tokens, labels=tokens).loss / 2
                loss.backward()
            losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][2] < losses[0][0]
