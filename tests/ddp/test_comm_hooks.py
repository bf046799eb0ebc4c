"""Compares communication hooks under torch's class and ours: the buckets that they see and all gradients, by bits."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

from ddp_cases import OnRanks, TorchDDP
from drivetrain import DistributedDataParallel as DDP

Future = torch.futures.Future
Hook = Callable[[Any, dist.GradBucket], Any]

# ---- Hooks as scripts write them. Each makes a state and a hook.


def when_summed(tensor: Tensor, then: Callable[[Tensor], Any]) -> Any:
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda summed: then(summed.value()[0]))


def done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def world() -> int:
    return dist.get_world_size()


def noise_in_place() -> tuple[Any, Hook]:
    """Adds noise that would stay between gradients, and clips by the norm of the whole bucket."""

    def hook(rng: torch.Generator, bucket: dist.GradBucket) -> Any:
        buffer = bucket.buffer()
        buffer.div_(buffer.norm().clamp_min(1))
        buffer.add_(torch.randn(buffer.shape, generator=rng, dtype=torch.float64).to(buffer.dtype), alpha=0.1)
        return when_summed(buffer, lambda total: total / world())

    return torch.Generator().manual_seed(3), hook


def top_k_with_feedback() -> tuple[Any, Hook]:
    def hook(residuals: dict[int, Tensor], bucket: dist.GradBucket) -> Any:
        buffer, index = bucket.buffer(), bucket.index()
        if index in residuals and residuals[index].shape == buffer.shape:
            buffer.add_(residuals[index])
        kept = buffer.abs().topk(max(1, buffer.numel() // 4)).indices
        sparse = torch.zeros_like(buffer).scatter_(0, kept, buffer[kept])
        residuals[index] = buffer - sparse
        gathered = [torch.empty_like(sparse) for _ in range(world())]
        dist.all_gather(gathered, sparse)
        return done(sum(gathered) / world())

    return {}, hook


def split_by_sizes() -> tuple[Any, Hook]:
    """Cuts the buffer by the parameters' sizes, normalizes each piece and writes it back through these views."""

    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        buffer = bucket.buffer()
        pieces = buffer.split([param.numel() for param in bucket.parameters()])
        for piece, grad, param in zip(pieces, bucket.gradients(), bucket.parameters(), strict=True):
            assert torch.equal(piece, grad.reshape(-1))
            assert grad.shape == param.shape
            piece.div_(1 + piece.abs().max())
        return when_summed(buffer, lambda total: total.div_(world()))

    return None, hook


def unflattened() -> tuple[Any, Hook]:
    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        grads = _unflatten_dense_tensors(bucket.buffer(), bucket.parameters())
        clipped = [grad.clone().clamp_(-0.1, 0.1) for grad in grads]
        return when_summed(_flatten_dense_tensors(clipped), lambda total: total / world())

    return None, hook


def resized_for_scatter() -> tuple[Any, Hook]:
    """Pads the buffer itself to a multiple of the ranks, sums in float64, and cuts it again."""

    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        buffer = bucket.buffer()
        numel = buffer.numel()
        buffer.resize_((numel // 7 + 1) * 7)[numel:] = 0
        rows = buffer.view(7, -1).double()
        dist.all_reduce(rows)
        buffer.copy_(rows.view(-1) / world())
        return done(buffer.resize_(numel))

    return None, hook


def larger_result() -> tuple[Any, Hook]:
    """Returns a tensor that is longer than the bucket, as a padded collective leaves it."""

    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        padded = torch.nn.functional.pad(bucket.buffer() / world(), (0, 5), value=9.0)
        return when_summed(padded, lambda total: total)

    return None, hook


def matrix_result() -> tuple[Any, Hook]:
    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        return when_summed(bucket.buffer() / world(), lambda total: total.view(1, -1))

    return None, hook


def other_dtype() -> tuple[Any, Hook]:
    """Sends half of the bits in the first half of the buffer itself, and returns them as they are."""

    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        buffer = bucket.buffer()
        numel = buffer.numel()
        narrow = buffer.view(torch.bfloat16)[:numel] if buffer.element_size() > 2 else buffer
        narrow.copy_((buffer / world()).to(torch.bfloat16))
        return when_summed(narrow, lambda total: total)

    return None, hook


def replaced_buffer() -> tuple[Any, Hook]:
    """Puts a tensor of another type into the bucket, as torch's wrappers do, and reduces by another hook."""

    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        original = bucket.buffer()
        bucket.set_buffer(original.double())
        assert bucket.gradients()[0].dtype == torch.float64
        future = default_hooks.allreduce_hook(dist.group.WORLD, bucket)

        def back(sums: Any) -> Tensor:
            return original.copy_(sums.value())

        return future.then(back)

    return None, hook


def emptied_storage() -> tuple[Any, Hook]:
    """Frees the buffer's memory while a copy travels."""

    def hook(_: Any, bucket: dist.GradBucket) -> Any:
        buffer = bucket.buffer()
        copy = buffer / world()
        bytes_before = buffer.untyped_storage().nbytes()
        buffer.untyped_storage().resize_(0)

        def restore(total: Tensor) -> Tensor:
            buffer.untyped_storage().resize_(bytes_before)
            return buffer.copy_(total)

        return when_summed(copy, restore)

    return None, hook


def momentum_in_hook() -> tuple[Any, Hook]:
    """Keeps the buffer's running mean by place, and the last buffers themselves."""

    def hook(state: dict[Any, Any], bucket: dist.GradBucket) -> Any:
        buffer = bucket.buffer()
        key = (bucket.index(), buffer.numel())
        state[key] = state[key] * 0.9 + buffer if key in state else buffer.clone()
        seen = state.setdefault(("buffer", *key), buffer)
        assert torch.equal(seen, buffer)  # shows this step's gradients
        return when_summed(state[key] / world(), lambda total: total)

    return {}, hook


def stale_by_a_step() -> tuple[Any, Hook]:
    """Returns the mean of the step before."""

    def hook(state: dict[int, Tensor], bucket: dist.GradBucket) -> Any:
        mean = bucket.buffer() / world()
        dist.all_reduce(mean)
        before = state.get(bucket.index())
        state[bucket.index()] = mean
        return done(mean if before is None or before.shape != mean.shape else before)

    return {}, hook


def residuals_of_grad() -> tuple[Any, Hook]:
    """Rounds the buffer in place, and keeps what .grad, which stays as it is, has more than it."""

    def hook(residuals: dict[int, Tensor], bucket: dist.GradBucket) -> Any:
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            grad.add_(residuals.get(id(param), torch.zeros(())))
            grad.copy_((grad * 8).round() / 8)
            residuals[id(param)] = param.grad - grad
        return when_summed(bucket.buffer(), lambda total: total / world())

    return {}, hook


def last_bucket_clips() -> tuple[Any, Hook]:
    """Adds up a norm over buckets until is_last(), and scales the last bucket by it."""

    def hook(state: list[float], bucket: dist.GradBucket) -> Any:
        state.append(float(bucket.buffer().double().pow(2).sum()))
        scale = 1.0 if not bucket.is_last() else 1 / (1 + sum(state) ** 0.5)
        if bucket.is_last():
            state.clear()
        return when_summed(bucket.buffer() * scale / world(), lambda total: total)

    return [], hook


def power_sgd(**options: Any) -> tuple[Any, Hook]:
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3, "min_compression_rate": 0.5, **options}
    return powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook


def wrapped_power_sgd() -> tuple[Any, Hook]:
    state, hook = power_sgd()
    return state, default_hooks.fp16_compress_wrapper(hook)


def local_sgd() -> tuple[Any, Hook]:
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=3, post_local_gradient_allreduce=True
    )
    return state, post_localSGD_hook.post_localSGD_hook


def local_sgd_alone() -> tuple[Any, Hook]:
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=3, post_local_gradient_allreduce=False
    )
    return state, post_localSGD_hook.post_localSGD_hook


def built_in(name: str) -> tuple[Any, Hook]:
    return name, lambda state, bucket: None  # registered by its name


OWN = [
    noise_in_place,
    top_k_with_feedback,
    split_by_sizes,
    unflattened,
    resized_for_scatter,
    larger_result,
    matrix_result,
    other_dtype,
    replaced_buffer,
    emptied_storage,
    momentum_in_hook,
    stale_by_a_step,
    residuals_of_grad,
    last_bucket_clips,
]
NUM_WITH_CALLBACKS = 3  # the first of the following
TORCHS: list[Callable[[], tuple[Any, Hook]]] = [
    power_sgd,
    lambda: power_sgd(use_error_feedback=False, warm_start=False),
    wrapped_power_sgd,
    local_sgd,
    local_sgd_alone,
    lambda: (dist.group.WORLD, default_hooks.allreduce_hook),
    lambda: (dist.group.WORLD, default_hooks.fp16_compress_hook),
    lambda: (dist.group.WORLD, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    lambda: (None, debugging_hooks.noop_hook),
    lambda: built_in("ALLREDUCE"),
    lambda: built_in("FP16_COMPRESS"),
]

# ---- Models and steps.


class Net(nn.Module):
    """Has gradients of odd sizes, in another order than the parameters' registration, one of them not row-major."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,), has_unused: bool = False) -> None:
        super().__init__()
        self.last = nn.Linear(7, 3)
        self.blocks = nn.ModuleList(nn.Linear(7, 7, dtype=dtypes[i % len(dtypes)]) for i in range(3))
        self.first = nn.Conv1d(1, 7, 5)
        self.scale = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            self.first.weight.data = self.first.weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        self.has_unused = has_unused

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x.unsqueeze(1)).mean(2) * self.scale
        for i, block in enumerate(self.blocks):
            if not (self.has_unused and i == 1 and (step + dist.get_rank()) % 3 == 0):
                x = block(x.tanh().to(block.weight.dtype)).to(x.dtype)
        return self.last(x)


class Recorder:
    """Calls the hook, and keeps what it saw."""

    def __init__(self, names: dict[int, str], hook: Hook) -> None:
        self.names, self.hook = names, hook
        self.seen: list[Any] = []

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        assert buffer.dim() == 1
        assert buffer.is_contiguous()
        assert buffer.storage_offset() == 0
        assert buffer.untyped_storage().nbytes() >= buffer.numel() * buffer.element_size()
        names = [self.names[id(param)] for param in bucket.parameters()]
        facts = (bucket.index(), bucket.is_last(), names, [grad.shape for grad in bucket.gradients()])
        self.seen.append((facts, buffer.clone()))
        return self.hook(state, bucket)


def register(model: nn.Module, state: Any, hook: Hook) -> Recorder:
    recorder = Recorder({id(param): name for name, param in model.module.named_parameters()}, hook)
    if isinstance(state, str):
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, state))
    else:
        model.register_comm_hook(state, recorder.__call__)
    return recorder


def steps(
    wrap: Callable[..., nn.Module],
    make_hook: Callable[[], tuple[Any, Hook]],
    *,
    num_steps: int = 6,
    hook_from: int = 0,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    accumulates: bool = False,
    sets_to_none: bool = True,
    holds: bool = False,
    **options: Any,
) -> list[Any]:
    """Trains and returns what hooks saw, the gradients of every step, and the parameters."""
    torch.manual_seed(0)
    model = wrap(Net(dtypes, options.get("find_unused_parameters", False)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    recorder, grads, held = None, [], []
    for step in range(num_steps):
        if step == hook_from:
            recorder = register(model, *make_hook())
        optimizer.zero_grad(set_to_none=sets_to_none)
        with model.no_sync() if accumulates else nullcontext():
            if accumulates:
                model(torch.randn(4, 9), step).pow(2).sum().backward()
        model(torch.randn(4, 9), step).pow(2).sum().backward()
        if holds:
            held.append([None if param.grad is None else param.grad for param in model.parameters()])
        grads.append([None if param.grad is None else param.grad.clone() for param in model.parameters()])
        optimizer.step()
    assert recorder is not None
    return [recorder.seen, grads, [param.detach().clone() for param in model.parameters()], held]


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), f"{where}: {ours} instead of {theirs}"
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), f"{where}: {len(ours)} instead of {len(theirs)}"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert ours == theirs, f"{where}: {ours} instead of {theirs}"


def compare(make_hook: Callable[[], tuple[Any, Hook]], transport: str, **options: Any) -> None:
    theirs = steps(TorchDDP, make_hook, **options)
    ours = steps(lambda module, **given: DDP(module, transport=transport, **given), make_hook, **options)
    assert_same(ours, theirs, f"{make_hook().__class__} {transport} {options}")


TRANSPORTS = ("torch", "shm")
TINY = {"bucket_cap_mb": 1e-4}  # about 26 values


def own_hooks() -> None:
    for i, make_hook in enumerate(OWN):
        compare(make_hook, TRANSPORTS[i % 2], bucket_cap_mb=(1e-4, 3e-4, 25)[i % 3])


def own_hooks_over_views() -> None:
    """Leaves out other_dtype, whose result torch's class takes for float32 where it lies in the buffer."""
    for i, make_hook in enumerate(make_hook for make_hook in OWN if make_hook is not other_dtype):
        compare(make_hook, TRANSPORTS[i % 2], bucket_cap_mb=(3e-4, 1e-4)[i % 2], gradient_as_bucket_view=True)


def torchs_hooks() -> None:
    """Leaves out quantized hooks, which read a future that gloo fills in another way, and the bfloat16 hook of NCCL.

    PowerSGD reduces in callbacks, whose order differs between ranks where there are several buckets.
    """
    for i, make_hook in enumerate(TORCHS):
        has_callbacks = i < NUM_WITH_CALLBACKS
        compare(make_hook, TRANSPORTS[i % 2], bucket_cap_mb=25 if has_callbacks else (3e-4, 1e-4)[i // 2 % 2])


def ways_of_training() -> None:
    several = (torch.float32, torch.bfloat16, torch.float64)
    for i, options in enumerate(
        (
            {"dtypes": several, **TINY},
            {"dtypes": several, "find_unused_parameters": True, **TINY},
            {"bucket_cap_mb_list": [1e-4, 3e-4]},
            {},
            {"hook_from": 1, **TINY},
            {"hook_from": 3, **TINY},
            {"hook_from": 5, "num_steps": 12},  # our buckets are planned from measurement before
            {"hook_from": 2, "holds": True, **TINY},
            {"hook_from": 2, "holds": True, "sets_to_none": False, **TINY},
            {"hook_from": 0, "holds": True, "sets_to_none": False, **TINY},
            {"hook_from": 3, "gradient_as_bucket_view": True, "sets_to_none": False, **TINY},
            {"find_unused_parameters": True, **TINY},
            {"find_unused_parameters": True, "hook_from": 2, **TINY},
            {"find_unused_parameters": True, "accumulates": True, "sets_to_none": False, **TINY},
            {"static_graph": True, **TINY},
            {"static_graph": True, "hook_from": 1, **TINY},
            {"static_graph": True, "hook_from": 4, **TINY},
            {"accumulates": True, **TINY},
            {"accumulates": True, "hook_from": 2, "sets_to_none": False, **TINY},
            {"gradient_as_bucket_view": True, "accumulates": True, **TINY},
        )
    ):
        compare((noise_in_place, momentum_in_hook, top_k_with_feedback)[i % 3], TRANSPORTS[i % 2], **options)


@pytest.mark.parametrize("function", [own_hooks, own_hooks_over_views, torchs_hooks, ways_of_training])
def test_hooks_see_torchs_buckets(on_ranks: OnRanks, function: Callable[[], None]) -> None:
    on_ranks(function)
