"""Compares accumulation with shard="gradients" with the unsharded wrapper: weights, windows and main gradients."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_cases import OURS, Blocks, Odd, Whole, expect_close, expect_equal, loss_of, train, transports, whole_loss
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import drivetrain
from drivetrain import DistributedDataParallel
from drivetrain.optim import base, left_to_torch
from ranks import run_on

pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own calls


# ---- Windows.


def windows(net: Any, optimizer: Any, micro_batches: int) -> None:
    with drivetrain.accumulate(net, optimizer, 3, max_grad_norm=None) as window:
        for micro in range(micro_batches):
            weight = 0.0 if micro == 2 and dist.get_rank() == 1 else 1.0 + (micro + dist.get_rank()) % 3
            window.backward(whole_loss(net, micro), weight=weight)


@run_on(2, 4)
def test_windows_have_the_bits_of_the_unsharded_wrapper() -> None:
    """Ranks have different numbers of micro-batches, and one ends several windows before the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, counts in enumerate(([6, 3], [5, 5], [7, 1], [4, 0])):
        transport = transports()[(number + size // 4) % len(transports())]  # four ranks take the other one
        nets = []
        for mode in (None, "gradients"):
            net = DistributedDataParallel(Whole(), bucket_cap_mb=0.0002, transport=transport, shard=mode)
            windows(net, OURS["AdamW"](net.parameters()), counts[rank % 2])
            assert all(param.grad is None for param in net.parameters())
            nets.append(net)
        expect_equal(nets[1], nets[0], (transport, counts))


@run_on(2)
def test_clipped_windows_have_the_bits_of_the_unsharded_wrapper() -> None:
    """A window with a scaler and clipping, over gradients that round."""
    nets = []
    for mode in (None, "gradients"):
        net = DistributedDataParallel(Odd(), shard=mode)
        optimizer, scaler = (
            OURS["AdamW"](net.parameters()),
            torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**8),
        )
        with drivetrain.accumulate(net, optimizer, 2, scaler=scaler, max_grad_norm=0.5) as window:
            for step in range(4):
                window.backward(loss_of(net, step), weight=step + 1)
        nets.append(net)
    expect_close(nets[1], nets[0], "scaler and clipping", rtol=1e-4, atol=1e-5)


@run_on(4)
def test_windows_with_a_shard_group() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    for transport in transports():
        nets = []
        for options in ({}, {"shard": "gradients", "shard_group": mine}):
            net = DistributedDataParallel(Whole(), transport=transport, **options)
            windows(net, OURS["AdamW"](net.parameters()), 5)
            nets.append(net)
        expect_equal(nets[1], nets[0], transport)


@run_on(2)
def test_a_window_continues_from_restored_rows() -> None:
    """Another process would restore rows and window in the middle, and go on with the same bits."""
    nets = []
    for stops in (False, True):
        net = DistributedDataParallel(Whole(), shard="gradients")
        optimizer = OURS["AdamW"](net.parameters())
        window = drivetrain.accumulate(net, optimizer, 3)
        with pytest.raises(ZeroDivisionError) if stops else warnings.catch_warnings(), window:
            for micro in range(3):
                if stops and micro == 2:
                    saved = window.state_dict()
                    rows = [param.grad.full_tensor() for param in net.parameters()]
                    raise ZeroDivisionError
                window.backward(whole_loss(net, micro), weight=micro + 1)
        if stops:
            again = drivetrain.accumulate(net, optimizer, 3)
            again.load_state_dict(saved)
            for param, whole in zip(net.parameters(), rows, strict=True):
                placed = drivetrain.optim.sharded.pieces.piece_of(param)
                param.grad = placed.distributed(placed.rows_of(whole).clone())
            with again:
                again.backward(whole_loss(net, 2), weight=3)
        nets.append(net)
    expect_equal(nets[1], nets[0], "restored")


# ---- Weights without a window.


def both(call: Callable[[Any], Any]) -> list[Any]:
    return [call(DistributedDataParallel(Whole(), shard=mode)) for mode in (None, "gradients")]


def whole_grads(net: Any) -> list[Tensor]:
    found = [param.grad for param in net.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in found]


@run_on(2)
def test_weighted_backwards_keep_sums_until_the_last() -> None:
    def collect(net: Any) -> list[list[Tensor]]:
        found = []
        for set_to_none in (True, False):
            with net.no_sync():
                net.backward(whole_loss(net, 0), weight=2)
                net.backward(whole_loss(net, 1), weight=1 + dist.get_rank())
            net.backward(whole_loss(net, 2), weight=3)
            found.append(whole_grads(net))
            net.zero_grad(set_to_none=set_to_none)
            with net.no_sync():  # a zeroed accumulation is forgotten, with its weights
                net.backward(whole_loss(net, 3), weight=5)
                net.zero_grad(set_to_none=set_to_none)
                net.backward(whole_loss(net, 4), weight=2)
            net.backward(whole_loss(net, 5), weight=0 if dist.get_rank() else 4)
            found.append(whole_grads(net))
            net.zero_grad(set_to_none=set_to_none)
        whole_loss(net, 6).backward()  # without weights again
        found.append(whole_grads(net))
        return found

    expected, found = both(collect)
    for step, (theirs, mine) in enumerate(zip(expected, found, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True)), step


@run_on(2)
def test_losses_from_elsewhere_keep_sums_until_the_last() -> None:
    """A weighted loss that did not come out of the wrapper's forward is reduced, too."""

    def collect(net: Any) -> list[Tensor]:
        with net.no_sync():
            net.backward(whole_loss(net, 0), weight=2)
        net.backward(whole_loss(net.module, 1), weight=1 + dist.get_rank())
        return whole_grads(net)

    expected, found = both(collect)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@run_on(2)
def test_misused_weights_raise() -> None:
    net = DistributedDataParallel(Whole(), shard="gradients")
    whole_loss(net, 0).backward()
    with pytest.raises(ValueError, match="found gradients that no weight counts"):
        net.backward(whole_loss(net, 1), weight=1)
    assert all(param.grad is None for param in net.parameters())  # on every rank, as none may go on
    with net.no_sync():
        net.backward(whole_loss(net, 2), weight=1)
    with pytest.raises(ValueError, match="this backward has no weight, but the gradients that it adds to"):
        whole_loss(net, 3).backward()
    net.zero_grad()
    whole_loss(net, 3).backward()
    net.zero_grad()
    with pytest.raises(ValueError, match=re.escape("sum to 0.0 over all ranks")):
        net.backward(whole_loss(net, 4), weight=0)
    with pytest.raises(ZeroDivisionError):
        net.backward(_raising(whole_loss(net, 5)), weight=1)
    net.zero_grad()
    net.backward(whole_loss(net, 6), weight=2)
    plain = DistributedDataParallel(Whole())
    plain.backward(whole_loss(plain, 6), weight=2)
    assert all(torch.equal(a, b) for a, b in zip(whole_grads(net), whole_grads(plain), strict=True))


def _raising(loss: Tensor) -> Tensor:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    loss = loss * 1
    loss.register_hook(fail)
    return loss


# ---- Main gradients.


@run_on(2, 4)
def test_main_gradients_are_kept_as_float32_rows() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return drivetrain.optim.AdamW(params, lr=1e-2, master_bits=32)

    def main_of(model: nn.Module) -> nn.Module:
        drivetrain.main_grads(model)
        return model

    def collect(net: Any, optimizer: Any, step: int) -> None:
        with net.no_sync():
            whole_loss(net, 2 * step).backward()
        whole_loss(net, 2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()

    for transport in transports():
        expected, _ = train(make, main_of(Whole(torch.bfloat16)), each=collect, transport=transport)
        model = main_of(Whole(torch.bfloat16))
        found, _ = train(make, model, each=collect, transport=transport, shard="gradients")
        expect_equal(found, expected, (transport, "main_grads"))
        once, _ = train(make, main_of(Blocks().bfloat16()), vocabulary=16, transport=transport)
        rows, _ = train(make, main_of(Blocks().bfloat16()), vocabulary=16, transport=transport, shard="gradients")
        expect_equal(rows, once, (transport, "main_grads, one backward"))
        loss_of(rows, 9, 16).backward()
        for param in rows.parameters():
            assert param.main_grad is None
            assert param.grad.dtype == torch.float32
            assert param.grad.to_local().shape[0] < param.shape[0]
        deep = main_of(nn.Sequential(*(nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(9))))
        of_deep = DistributedDataParallel(deep, bucket_cap_mb=0.2, transport=transport, shard="gradients").reducer
        assert of_deep.buffer_bytes() < 0.6 * sum(4 * param.numel() for param in deep.parameters())


@run_on(2)
def test_what_main_gradients_do_not_support_raises() -> None:
    model = Whole(torch.bfloat16)
    drivetrain.main_grads(model, bits=24)
    with pytest.raises(NotImplementedError, match=r"main_grads\(bits=24\) does not go together with shard"):
        DistributedDataParallel(model, shard="gradients")
    model = Whole(torch.bfloat16)
    drivetrain.main_grads(model)
    model.layers[0].bias.requires_grad_(False)
    with pytest.raises(NotImplementedError, match="has a main gradient and is not reduced"):
        DistributedDataParallel(model, shard="gradients")
    assert model.layers[0].weight.main_grad is not None  # nothing has changed


# ---- What needs whole gradients.


@run_on(2)
def test_what_needs_whole_gradients_raises() -> None:
    for mode in ("raise", "skip"):
        with pytest.raises(NotImplementedError, match="check_gradients does not go together with shard='gradients'"):
            DistributedDataParallel(Odd(), shard="gradients", check_gradients=mode)


@run_on(2)
def test_installed_steps_need_whole_gradients() -> None:
    """torch's names mean our optimizers, which step rows. Where torch's own step would take over, they raise."""
    before = list(left_to_torch.constructed)
    drivetrain.install(optim=True)
    try:
        for name in ("AdamW", "SGD"):

            def make(params: Any, name: str = name) -> torch.optim.Optimizer:
                return getattr(torch.optim, name)(params, lr=1e-2)

            expected, _ = train(make, Odd())
            for mode in ("optimizer", "gradients"):
                found, optimizer = train(make, Odd(), shard=mode)
                assert isinstance(optimizer, base.FusedOptimizer)
                expect_equal(found, expected, (name, mode))
        for mode in ("optimizer", "gradients"):
            net = DistributedDataParallel(Odd(), shard=mode)
            values = [param.detach().clone() for param in net.parameters()]
            loss_of(net, 0).backward()
            with pytest.warns(UserWarning, match="torch.optim.SGD stays torch's own class"):
                torchs = torch.optim.SGD(net.parameters(), lr=0.1, differentiable=True)
            with pytest.raises(NotImplementedError, match="SGD takes torch's steps, and has parameters of a Dist"):
                torchs.step()
            optimizer = torch.optim.SGD([net.module.scale], lr=0.1)
            others = [param for param in net.parameters() if param is not net.module.scale]
            with pytest.raises(ValueError, match="lr"):
                optimizer.add_param_group({"params": others, "lr": -0.1})
            assert len(optimizer.param_groups) == 1
            assert all(torch.equal(a, b) for a, b in zip(values, net.parameters(), strict=True))
    finally:
        drivetrain.uninstall()
        left_to_torch.constructed[:] = before
