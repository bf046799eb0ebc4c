"""Tests that drivetrain.checkpoint gives the bits of plain calls, with the same operations as torch's checkpoint."""

import collections
import contextlib
import copy
import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from regions import (
    ALL,
    MODELS,
    Attention,
    Block,
    Checkpoint,
    assert_same,
    grads_of,
    loss_of,
    plain,
    result_of,
    torchs,
    verified,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from drivetrain import DistributedDataParallel, checkpoint
from drivetrain.optim import AdamW
from drivetrain.recompute.location import here, owner_of
from ranks import run_on

# ---- Bits.


@ALL
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_bits(name: str, autocast: bool, call: Checkpoint) -> None:
    make, make_input = MODELS[name]
    model, x = make(), make_input()
    models = copy.deepcopy(model), model
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_same(result_of(call, models[0], x), result_of(plain, models[1], x))


@pytest.mark.parametrize("nested", [False, True])
def test_an_operation_that_writes_what_it_has_saved(nested: bool) -> None:
    """RReLU saves its noise before it draws it, here as the last tensor; torch's checkpoint gives wrong gradients."""
    model, x = nn.Sequential(nn.Linear(8, 64), nn.RReLU()), torch.randn(16, 8)

    def called(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(functools.partial(checkpoint, model) if nested else model, x)

    models = copy.deepcopy(model), model
    assert_same(result_of(called, models[0], x), result_of(plain, models[1], x))


def test_the_default_dtype_is_the_forwards() -> None:
    x = torch.ones(3, requires_grad=True)
    torch.set_default_dtype(torch.float64)
    try:
        out = checkpoint(lambda x: x * torch.linspace(0, 1, 3).sin(), x)
    finally:
        torch.set_default_dtype(torch.float32)
    out.sum().backward()
    assert torch.equal(x.grad, torch.linspace(0, 1, 3, dtype=torch.float64).sin().float())
    assert torch.get_default_dtype() == torch.float32


def test_verify_knows_the_statistics_of_instance_normalization() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.InstanceNorm2d(4, track_running_stats=True), nn.Conv2d(4, 2, 1))
    models, x = (copy.deepcopy(model), model), torch.randn(3, 2, 5, 5)
    assert_same(result_of(verified, models[0], x), result_of(plain, models[1], x))


@pytest.mark.parametrize("backward_autocast", [False, True])
@pytest.mark.parametrize("forward_autocast", [None, torch.bfloat16])
def test_autocast_is_the_forwards(forward_autocast: torch.dtype | None, backward_autocast: bool) -> None:
    model, x = MODELS["block"][0](), torch.randn(2, 5, 16)
    results = []
    for call in (checkpoint, plain):
        model.zero_grad()
        torch.manual_seed(0)
        with torch.autocast("cpu", forward_autocast or torch.bfloat16, enabled=forward_autocast is not None):
            loss = loss_of(call(model, x))
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_autocast):
            loss.backward()
            state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        assert state == (backward_autocast, torch.bfloat16)
        assert not torch.is_autocast_enabled("cpu")
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert_same(*results)


@ALL
def test_nested(call: Checkpoint) -> None:
    blocks = nn.Sequential(Block(), Block())
    x = torch.randn(2, 5, 16)
    nested = copy.deepcopy(blocks)
    for block in nested:
        assert isinstance(block, Block)
        block.call = lambda mlp, x: call(lambda x: call(mlp, x), x)

    def two_of_each(outer: Checkpoint, model: nn.Module, x: Tensor) -> Tensor:
        return outer(model, outer(model, x))  # one region's output is another's input

    assert_same(result_of(functools.partial(two_of_each, call), nested, x),
                result_of(functools.partial(two_of_each, plain), blocks, x))  # fmt: skip


@ALL
def test_keyword_arguments(call: Checkpoint) -> None:
    attention, x, mask = Attention(), torch.randn(2, 5, 16), torch.randn(5, 5)
    reference = copy.deepcopy(attention)
    assert_same(result_of(call, attention, x, mask=mask), result_of(plain, reference, x, mask=mask))


def test_arguments_in_structures() -> None:
    def function(pairs: list[Any], *, named: dict[str, Any], flag: bool) -> Any:
        assert flag
        (a, b), c = pairs
        return (a * b).exp() * c["deep"][0] + named["scale"].sin(), len(pairs)

    leaves = [torch.randn(3, requires_grad=True) for _ in range(4)]
    grads = []
    for call in (checkpoint, plain):
        a, b, c, scale = leaves
        out, count = call(function, [(a, b), {"deep": (c, None)}], named={"scale": scale, "x": [1]}, flag=True)
        assert count == 2
        grads.append(list(torch.autograd.grad(out.sum(), leaves)))
    assert_same(*grads)


def test_containers_are_given_as_they_were_found() -> None:
    def function(x: Tensor, notes: list[str], more: dict[str, list[int]]) -> Tensor:
        assert (notes, more) == (["before"], {"a": [1]})
        notes.append("during")
        more["a"].append(2)
        return x.exp().sin()

    x, notes, more = torch.randn(3, requires_grad=True), ["before"], {"a": [1]}
    out = checkpoint(function, x, notes, more)
    notes.append("after")
    out.sum().backward()
    assert notes == ["before", "during", "after"]
    assert more == {"a": [1, 2]}


class Strict(dict[str, Any]):
    """Has items that its own methods do not show."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("the script's code alone may call this")

    def __iter__(self) -> Iterator[str]:
        return iter(())


class Stack(list[Any]):
    note = ""


def test_containers_of_subclasses_are_given_as_they_were_found() -> None:
    def function(cache: Any, stack: Any) -> Tensor:
        x = cache["x"]
        y = stack.pop() * x
        dict.__setitem__(cache, "x", x.detach() * 100)
        return y.exp().sin()

    for make in (collections.OrderedDict, functools.partial(collections.defaultdict, list), Strict):
        x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
        grads = []
        for call in (checkpoint, plain):
            cache, stack = make({"x": x}), Stack([y])
            stack.note = "attribute"
            grads.append(list(torch.autograd.grad(call(function, cache, stack).sum(), (x, y))))
            assert len(stack) == 0
            assert dict.__getitem__(cache, "x") is not x
        assert_same(*grads)


def test_a_recomputation_has_the_switches_of_its_forward() -> None:
    def switches() -> tuple[bool, str, bool]:
        return (
            torch._C._get_mkldnn_enabled(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def function(x: Tensor) -> Tensor:
        seen.append(switches())
        return x.exp().sin()

    seen: list[tuple[bool, str, bool]] = []
    before = switches()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch._C._set_mkldnn_enabled(False)
        loss = checkpoint(function, torch.randn(3, requires_grad=True)).sum()
        torch._C._set_mkldnn_enabled(before[0])
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(False)
        now = switches()
        loss.backward()
        assert switches() == now
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.use_deterministic_algorithms(before[2])
    assert seen == [(False, "medium", True)] * 2


# ---- Kinds of backward.


def function_of_two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x = F.dropout(x.exp() * y.sin(), 0.5)
    return x.tanh() * y, (x * y).sigmoid()


@ALL
def test_retained_partial_and_double_backward(call: Checkpoint) -> None:
    def run(call: Checkpoint) -> list[Tensor]:
        torch.manual_seed(2)
        x, y = torch.linspace(-1, 1, 6, requires_grad=True), torch.linspace(2, 3, 6, requires_grad=True)
        a, b = call(function_of_two, x, y)
        results = [*torch.autograd.grad(a.sum(), (x, y), retain_graph=True)]
        results += torch.autograd.grad(b.sum(), y, retain_graph=True)
        (a.sum() + b.sum()).backward(retain_graph=True)
        (a.sum() - b.sum()).backward(retain_graph=True, inputs=[x])
        (first,) = torch.autograd.grad(a.square().sum(), x, create_graph=True)
        results += torch.autograd.grad(first.square().sum(), (x, y), retain_graph=True)
        results += torch.autograd.grad((a.sum(), first.sin().sum()), (x, y))
        return [*results, *grads_of(x, y), first.detach()]

    assert_same(run(call), run(plain))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("retain_graph", [True, False])
@ALL
def test_backward_inside(call: Checkpoint, retain_graph: bool, early_stop: bool) -> None:
    def function(x: Tensor) -> Tensor:
        z = x.sin().cos()
        (gradient,) = torch.autograd.grad(z.sum(), x, retain_graph=retain_graph)
        return x.cos() * gradient * (z.exp() if retain_graph else 1)

    grads = []
    for of in (functools.partial(call, early_stop=early_stop), plain):
        x = torch.linspace(0, 1, 5, requires_grad=True)
        of(function, x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_custom_function_that_reads_its_tensors_twice() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, x * 2)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x, double), (again, _) = ctx.saved_tensors, ctx.saved_tensors
            assert torch.equal(x, again)
            return grad * double

    x = torch.randn(3, requires_grad=True)
    checkpoint(lambda x: Twice.apply(x.exp()), x).sum().backward()
    expected = x.detach().requires_grad_()
    Twice.apply(expected.exp()).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_without_grad_mode_it_is_a_call() -> None:
    model, x = Block(), torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(checkpoint(model, x), expected)
    assert checkpoint(lambda: "text") == "text"
    assert checkpoint(lambda *args, **kwargs: (args, kwargs), 1, a=[2]) == ((1,), {"a": [2]})


def test_a_group_of_backwards_recomputes_once() -> None:
    calls = []

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return x.exp().sin(), y.exp().sin()

    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    a, b = checkpoint(function, x, y)
    with torch.utils.checkpoint.GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert len(calls) == 2
    assert torch.equal(y.grad, (y.exp().cos() * y.exp()).detach())


# ---- Random numbers.


def test_random_numbers_outside_are_left_alone() -> None:
    x = torch.randn(100, requires_grad=True)
    out = checkpoint(F.dropout, x, 0.5)
    torch.manual_seed(7)
    torch.randn(3)  # half of a pair of normal numbers stays behind
    expected, state = torch.randn(5), None
    torch.manual_seed(7)
    torch.randn(3)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.randn(5), expected)
    assert torch.equal(x.grad, out.detach() / x.detach())


def test_random_numbers_of_a_fork() -> None:
    """The state is the same before and after, and numbers were drawn all the same."""

    def function(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return F.dropout(x, 0.5).exp()

    grads = []
    for call in (checkpoint, plain):
        x = torch.ones(64, requires_grad=True)
        torch.manual_seed(3)
        out = call(function, x)
        torch.rand(9)
        out.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_random_numbers_may_be_let_go() -> None:
    x = torch.ones(1000, requires_grad=True)
    torch.manual_seed(0)
    out = checkpoint(lambda x: F.dropout(x, 0.5).exp() * 2, x, preserve_rng_state=False)
    out.sum().backward()
    assert not torch.equal(x.grad != 0, out.detach() != 2)


# ---- Early stop and memory.


class Counting(TorchDispatchMode):
    """Counts the operations that reach a device; detach is how saved tensors are handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations_of(call: Checkpoint, early_stop: bool) -> Counter[str]:
    call = functools.partial(call, early_stop=early_stop)
    model, x = nn.Sequential(Block(call), Block(call)), torch.randn(2, 5, 16)
    out = call(model, x)
    with Counting() as counting:
        out.sum().backward()
    del counting.counts["aten.detach.default"]
    return counting.counts


@pytest.mark.parametrize("early_stop", [True, False])
def test_operations_are_as_many_as_torchs(early_stop: bool) -> None:
    ours = operations_of(checkpoint, early_stop)
    theirs = operations_of(torchs, early_stop)
    del ours["aten.empty.memory_format"], theirs["aten.empty.memory_format"]  # torch 2.11 keeps random states in them
    assert ours == theirs
    assert ours["aten.gelu.default"] == (3 if early_stop else 4)
    assert ours["aten.addmm.default"] == (8 if early_stop else 12)


def test_early_stop_of_torchs_context() -> None:
    def calls(early_stop: bool) -> int:
        seen = []
        x = torch.randn(3, requires_grad=True)
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            out = checkpoint(lambda x: (x.exp().sin() + 1, seen.append(1))[0], x)
        out.sum().backward()
        return len(seen)

    assert (calls(True), calls(False)) == (1, 2)


def test_early_stop_passes_handlers() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        with contextlib.suppress(Exception):
            return x.exp().sin()
        seen.append("suppressed")
        return x

    x = torch.randn(3, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert not seen


def test_early_stop_that_is_caught() -> None:
    def function(x: Tensor) -> Tensor:
        try:
            y = x.exp().sin()
        except BaseException:
            y = x.exp().sin().exp()
        return y

    x = torch.randn(3, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())


@pytest.mark.parametrize("verify", [False, True])
def test_nothing_is_kept(verify: bool) -> None:
    """Activations die in forward, arguments and recomputed values with the graph; nothing waits for the collector."""
    made: list[weakref.ref[Any]] = []

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            made.append(weakref.ref(y.untyped_storage()))
            made.append(weakref.ref(y))
            return y.sin().cos()

    gc.collect()
    gc.disable()
    try:
        x = torch.randn(1000, requires_grad=True)
        middle = x * 2
        out = checkpoint(nn.Sequential(Watching(), Watching()), middle, verify=verify)
        assert [ref() for ref in made] == [None] * 4
        argument = weakref.ref(middle)
        del middle
        assert argument() is not None
        (_,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert [ref() for ref in made] == [None] * 8
        out.sum().backward()
        assert [ref() for ref in made] == [None] * 12
        assert argument() is None
    finally:
        gc.enable()


def test_an_inner_region_keeps_nothing_of_the_outer() -> None:
    arguments: list[weakref.ref[Tensor]] = []

    def outer(x: Tensor) -> Tensor:
        y = x.exp()
        arguments.append(weakref.ref(y))
        return checkpoint(lambda pair, *, z: (pair[0].sin() * z.cos()).tanh(), [y], z=y)

    x = torch.randn(3, requires_grad=True)
    out = checkpoint(outer, x)
    assert arguments[0]() is None
    out.sum().backward()
    expected = x.detach().requires_grad_()
    y = expected.exp()
    (y.sin() * y.cos()).tanh().sum().backward()
    assert torch.equal(x.grad, expected.grad)


# ---- Threads, contexts, other variants.


def test_threads() -> None:
    """Regions called in two threads at a time, and a backward in another one."""
    model, x = Block().mlp.eval(), torch.randn(2, 5, 16)
    expected = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    results: list[Any] = []

    def run() -> None:
        for _ in range(5):
            loss = loss_of(checkpoint(model, checkpoint(nn.Identity(), x)))
            results.append(torch.autograd.grad(loss, list(model.parameters())))

    loss = loss_of(checkpoint(model, x))
    threads = [threading.Thread(target=run) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: results.append(torch.autograd.grad(loss, list(model.parameters())))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 11
    for result in results:
        assert_same(list(result), list(expected))


def test_device_contexts_are_the_forwards() -> None:
    x = torch.randn(3, requires_grad=True)
    seen = []
    with torch.device("meta"):
        out = checkpoint(lambda x: (x.exp().sin(), seen.append(torch.empty(1).device))[0], x, early_stop=False)
    out.sum().backward()
    assert [device.type for device in seen] == ["meta", "meta"]


def test_offloaded_by_hooks_outside() -> None:
    """Arguments are saved as autograd saves, so that save_on_cpu and the like see them."""
    packed = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.shape) or t.numpy(force=True), torch.tensor
    ):
        out = checkpoint(lambda x: x.exp().sin(), x)
    assert packed == [x.shape]
    out.sum().backward()
    assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())


@pytest.mark.parametrize(
    "options", [{"use_reentrant": True}, {"debug": True}, {"context_fn": lambda: (contextlib.nullcontext(),) * 2}]
)
def test_torchs_variants(options: dict[str, Any]) -> None:
    x = torch.randn(3, requires_grad=True)
    out = checkpoint(lambda x: x.exp().sin(), x, **options)
    out.sum().backward()
    assert torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())
    with pytest.raises(NotImplementedError, match="verify=True is not supported with use_reentrant=True"):
        checkpoint(lambda x: x.exp(), x, verify=True, **options)


def test_functorch_says_no_as_with_torchs() -> None:
    for call in (checkpoint, torchs):
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            torch.func.grad(lambda x, call=call: call(torch.exp, x).sum())(torch.randn(3))


def test_compiled() -> None:
    def step(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.gelu(x.exp()).sin(), x)

    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    (ours,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(step(x).sum(), x)
    torch.testing.assert_close(ours, expected)


def test_locations_where_the_graph_breaks() -> None:
    step = torch.compile(lambda x: (x.sin(), here(), owner_of(x)), backend="eager")
    _, at, owner = step(torch.ones(2))  # Dynamo warned of sys._getframe, always on Python 3.14
    assert "test_checkpoint.py:" in at
    assert not owner


def test_verified_where_the_graph_breaks() -> None:
    x = torch.ones(100, requires_grad=True)
    step = torch.compile(
        lambda x: checkpoint(F.dropout, x.sin(), preserve_rng_state=False, verify=True), backend="eager"
    )
    with pytest.raises(CheckpointError, match="has other values"):
        step(x).sum().backward()


# ---- Random chains of operations.

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: x.clamp(-2, 2).exp(),
    "sin": torch.sin,
    "matmul": lambda x: (x @ x.t() @ x).tanh(),
    "dropout": lambda x: F.dropout(x, 0.3),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "halve": lambda x: x[..., ::2].repeat(1, 2),
    "relu_": lambda x: x.clone().relu_(),
    "noise": lambda x: x + torch.randn_like(x),
    "softmax": lambda x: x.softmax(-1),
    "untracked": lambda x: x * x.detach(),
}
NAMES = st.sampled_from(sorted(OPERATIONS))
CHAINS = st.recursive(NAMES, lambda chains: st.lists(chains, min_size=1, max_size=4), max_leaves=10)


def run_chain(call: Checkpoint, chain: Any, x: Tensor) -> Tensor:
    if isinstance(chain, str):
        return OPERATIONS[chain](x)
    for part in chain:
        x = call(run_chain, call, part, x) if isinstance(part, list) else run_chain(call, part, x)
    return x


@settings(max_examples=80, deadline=None)
@given(chain=CHAINS, early_stop=st.booleans(), verify=st.booleans(), backwards=st.integers(1, 2))
def test_chains(chain: Any, early_stop: bool, verify: bool, backwards: int) -> None:
    results = []
    for call in (functools.partial(checkpoint, early_stop=early_stop, verify=verify), plain, torchs):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        out = call(run_chain, call, chain, x)
        for left in reversed(range(backwards)):
            out.sin().sum().backward(retain_graph=left > 0)
        results.append([out.detach(), *grads_of(x), torch.get_rng_state()])
    assert_same(results[0], results[1])
    assert_same(results[2], results[1])


# ---- Ranks.


class Branching(nn.Module):
    def __init__(self, call: Checkpoint) -> None:
        super().__init__()
        self.call = call
        self.first, self.left, self.right = Block(call), Block(call), Block(call)

    def forward(self, x: Tensor, use: list[str]) -> Tensor:
        x = self.call(self.first, x)
        for name in use:
            x = self.call(getattr(self, name), x)
        return x


def train(call: Checkpoint, unused: bool, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Branching(call), find_unused_parameters=unused)
    torch.manual_seed(rank)
    results = []
    for step in range(4):
        use = ["left", "right"] if not unused else [["left"], ["right"], []][(rank + step) % 3]
        loss = loss_of(model(torch.randn(2, 5, 16), use))
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return results


@pytest.mark.parametrize("unused", [False, True], ids=["all used", "some unused"])
@run_on(2)
def test_under_ddp(unused: bool) -> None:
    rank = torch.distributed.get_rank()
    expected = train(plain, unused, rank)
    assert_same(train(checkpoint, unused, rank), expected)
    assert_same(train(verified, unused, rank), expected)


def test_parameters_that_backward_steps() -> None:
    """One is in two regions: it is stepped after both have been recomputed."""
    base = nn.Sequential(*[Block().mlp for _ in range(3)])
    base[2][0].weight = base[0][0].weight
    x = torch.randn(4, 16)
    results = []
    for call in (checkpoint, plain):
        model = copy.deepcopy(base)
        AdamW(model.parameters(), lr=0.1).step_in_backward(model)
        torch.manual_seed(3)
        for _ in range(3):
            y = x
            for layer in model:
                y = call(layer, y)
            y.square().sum().backward()
        results.append([param.detach() for param in model.parameters()])
    assert_same(*results)


# ---- GPUs.


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize("name", ["mlp", "dropout"])  # kernels that give the same bits in every run
def test_bits_on_a_gpu(name: str, call: Checkpoint) -> None:
    make, make_input = MODELS[name]
    model, x = make().cuda(), make_input().cuda()
    reference = copy.deepcopy(model)
    results = []
    for of, which in ((call, model), (plain, reference)):
        torch.cuda.manual_seed(1)
        results.append([*result_of(of, which, x), torch.cuda.get_rng_state()])
    assert_same(*results)
