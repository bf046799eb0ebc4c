"""Compares DistributedDataParallel(shard=...) with the unsharded wrapper: bits, bytes, gradients and errors."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_cases import (
    OURS,
    TORCHS,
    WITH_SUMS,
    Blocks,
    Odd,
    alone_before_a_step,
    expect_close,
    expect_equal,
    loss_of,
    train,
    transports,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import drivetrain
from drivetrain import DistributedDataParallel
from drivetrain.optim.sharded import pieces
from ranks import run_on

OnRanks = Callable[..., list[Any]]
MODES = ("optimizer", "gradients")
pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own calls


# ---- Bits.


@run_on(2, 4)
def test_element_wise_steps_have_the_bits_of_the_unsharded_wrapper() -> None:
    for kind, makes in (("ours", OURS), ("torch's", TORCHS)):
        for number, (name, make) in enumerate(makes.items()):
            all_transports = transports()
            one = all_transports[number % len(all_transports)]
            for transport in all_transports if name == "AdamW" else (one,):
                expected, _ = train(make, Odd(), transport=transport)
                for mode in MODES:
                    found, _ = train(make, Odd(), transport=transport, shard=mode)
                    expect_equal(found, expected, (transport, kind, name, mode))


@run_on(2)
def test_parameters_that_move_between_steps_are_gathered() -> None:
    """AdamWScheduleFree moves parameters outside of steps, too."""

    def each(net: Any, optimizer: Any, step: int) -> None:
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        if step < 2:
            optimizer.train()

    def make(params: Any) -> torch.optim.Optimizer:
        return drivetrain.optim.AdamWScheduleFree(params, lr=1e-2)

    expected, _ = train(make, Odd(), each=each)
    for mode in MODES:
        found, _ = train(make, Odd(), each=each, shard=mode)
        expect_equal(found, expected, mode)


def backward_over_a_step_of_other_parameters() -> list[int]:
    model = nn.ModuleDict({"stepped": nn.Linear(4, 4), "kept": nn.Linear(4, 4)})
    model.forward = lambda inputs: model["kept"](model["stepped"](inputs))
    wrapped = DistributedDataParallel(model, shard="optimizer")
    optimizer = drivetrain.optim.SGD(model["stepped"].parameters(), lr=0.1)
    wrapped(torch.ones(2, 4)).sum().backward()
    inputs = torch.ones(2, 4, requires_grad=True)
    loss = model["kept"](inputs).square().sum()  # saves the weight for its input's gradient
    before = [param._version for param in (model["stepped"].weight, model["kept"].weight)]
    optimizer.step()
    loss.backward()
    after = [param._version for param in (model["stepped"].weight, model["kept"].weight)]
    return [int(new > old) for old, new in zip(before, after, strict=True)]


def test_a_step_leaves_the_versions_of_other_parameters(on_ranks: OnRanks) -> None:
    assert on_ranks(backward_over_a_step_of_other_parameters) == [[1, 0]] * 2


FORMATS: dict[str, dict[str, Any]] = {
    "8 bits": {"state_bits": 8, "min_8bit_size": 0},
    "4 bits": {"state_bits": 4, "min_8bit_size": 0},
    "fp8": {"state_bits": "fp8", "min_8bit_size": 0},
    "24-bit masters and 8 bits": {"master_bits": 24, "state_bits": 8, "min_8bit_size": 0},
    "kahan": {"rounding": "kahan"},
}


@run_on(4)
def test_storage_formats_have_the_same_bits_where_parts_are_whole_blocks() -> None:
    for name, options in FORMATS.items():

        def make(params: Any, options: dict[str, Any] = options) -> torch.optim.Optimizer:
            return drivetrain.optim.AdamW(params, lr=1e-2, **options)

        dtype = torch.float32 if name in ("8 bits", "fp8") else torch.bfloat16
        expected, _ = train(make, Blocks().to(dtype), vocabulary=16)
        for mode in MODES:
            found, optimizer = train(make, Blocks().to(dtype), vocabulary=16, shard=mode)
            expect_equal(found, expected, (name, mode))
            if "8" in name:
                assert any("exp_avg_codes" in values for values in optimizer.state.values()), name


@run_on(2)
def test_states_of_whole_formats_are_divided() -> None:
    """A sharded optimizer continues from the states of an unsharded one, whatever their format."""
    for name, options in FORMATS.items():
        dtype = torch.float32 if name in ("8 bits", "fp8") else torch.bfloat16
        nets = []
        for mode in (None, *MODES):
            net = DistributedDataParallel(Blocks().to(dtype))
            optimizer = drivetrain.optim.AdamW(net.parameters(), lr=1e-2, **options)
            for step in range(2):
                loss_of(net, step, 16).backward()
                optimizer.step()
                optimizer.zero_grad()
            if mode is not None:
                saved = optimizer.state_dict()
                net = DistributedDataParallel(net.module, shard=mode)
                optimizer = drivetrain.optim.AdamW(net.parameters(), lr=1e-2, **options)
                optimizer.load_state_dict(saved)
            loss_of(net, 2, 16).backward()
            optimizer.step()
            nets.append(net)
        for found in nets[1:]:
            expect_close(found, nets[0], name)  # 8-bit states pass through float32


@run_on(2)
def test_states_of_unsharded_steps_are_divided() -> None:
    """Optimizers that have stepped whole parameters go on with parts of their states."""
    for make in (OURS["AdamW"], TORCHS["AdamW"], TORCHS["Adagrad"]):
        model = Odd()
        optimizer = make(model.parameters())
        net: nn.Module = DistributedDataParallel(model)
        reference, _ = train(make, Odd(), 4)
        for step in range(4):
            if step == 2:
                net = DistributedDataParallel(model, shard="optimizer")
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        expect_equal(net, reference, type(optimizer).__name__)
        whole = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim]
        assert bytes_of(whole) < 1.2 * sum(p.nbytes for p in model.parameters())


@run_on(2)
def test_main_grads_work_with_sharded_states() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return drivetrain.optim.AdamW(params, lr=1e-2, master_bits=32)

    def model() -> nn.Module:
        found = Blocks().bfloat16()
        drivetrain.main_grads(found)
        return found

    def twice(net: Any, optimizer: Any, step: int) -> None:
        with net.no_sync():
            loss_of(net, 2 * step, 16).backward()
        loss_of(net, 2 * step + 1, 16).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected, _ = train(make, model(), each=twice)
    found, optimizer = train(make, model(), each=twice, shard="optimizer")
    expect_equal(found, expected, "main_grads")
    assert optimizer.param_groups[0]["params"][0].grad_dtype == torch.float32


@run_on(4)
def test_rules_with_sums_over_parameters_agree_with_the_unsharded_wrapper() -> None:
    for name, make in WITH_SUMS.items():
        expected, _ = train(make, Odd())
        for mode in MODES:
            found, _ = train(make, Odd(), shard=mode)
            expect_close(found, expected, (name, mode), rtol=1e-4, atol=1e-5)


@run_on(4)
def test_muon_agrees_with_the_unsharded_wrapper() -> None:
    """Two optimizers step one wrapper's parameters: Muon gathers matrices, AdamW steps the rest."""

    def run(**options: Any) -> nn.Module:
        net = DistributedDataParallel(Blocks(), **options)
        both = [
            drivetrain.optim.Muon([net.module.body.weight], lr=1e-2),
            drivetrain.optim.AdamW([net.module.body.bias, net.module.embed.weight], lr=1e-2),
        ]
        for step in range(3):
            loss_of(net, step, 16).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        return net

    expected = run()
    for mode in MODES:
        expect_close(run(shard=mode), expected, ("Muon", mode))


@run_on(4)
def test_a_shard_group_has_a_set_of_states_of_its_own() -> None:
    """Ranks 0 and 1 share one set of states, ranks 2 and 3 another one."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    for transport in transports():
        for name, make in (("ours", OURS["AdamW"]), ("torch's", TORCHS["AdamW"])):
            expected, _ = train(make, Odd(), transport=transport)
            for mode in MODES:
                found, optimizer = train(make, Odd(), transport=transport, shard=mode, shard_group=mine)
                expect_equal(found, expected, (transport, name, mode))
                states = [values["exp_avg"] for values in optimizer.state_dict()["state"].values()]
                (of_embed,) = (state for state in states if state.shape == (37, 24))
                assert of_embed.to_local().shape[0] == (19, 18)[dist.get_rank(mine)]


# ---- Bytes.


class Ordinary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(503, 96)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(96, 384), nn.Linear(384, 96)) for _ in range(8)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embed(tokens))


def bytes_of(tensors: Any) -> int:
    """Returns the bytes of storages, each counted once."""
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@run_on(4)
def test_states_and_gradients_take_their_share_of_bytes() -> None:
    size = dist.get_world_size()
    for make in (OURS["AdamW"], TORCHS["AdamW"]):
        for mode in MODES:
            net, optimizer = train(make, Ordinary(), 2, vocabulary=503, shard=mode)
            loss_of(net, 2, 503).backward()
            whole = sum(param.nbytes for param in net.parameters())
            states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim]
            assert bytes_of(states) <= 1.03 * 2 * whole / size, (mode, bytes_of(states), whole)
            if mode == "gradients":
                gradients = bytes_of(param.grad for param in net.parameters())
                assert gradients <= 1.03 * whole / size, (gradients, whole)
                assert net.reducer.buffer_bytes() < whole


# ---- Gradients.


@run_on(2)
def test_gradients_are_collected_and_clipped() -> None:
    def collect(net: Any, optimizer: Any, step: int) -> None:
        with net.no_sync():
            for micro in range(2):
                loss_of(net, 3 * step + micro).backward()
        loss_of(net, 3 * step + 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)

    def window(net: Any, optimizer: Any) -> None:
        with drivetrain.accumulate(net, optimizer, 2) as steps:
            for step in range(4):
                steps.backward(loss_of(net, step), weight=step + 1)

    for make in (OURS["AdamW"], TORCHS["SGD"]):
        expected, _ = train(make, Odd(), each=collect)
        found, _ = train(make, Odd(), each=collect, shard="optimizer")
        expect_equal(found, expected, "no_sync, optimizer")
        found, _ = train(make, Odd(), each=collect, shard="gradients")
        expect_close(found, expected, "no_sync, gradients", rtol=1e-4, atol=1e-5)
        nets = []
        for mode in (None, "optimizer"):
            net = DistributedDataParallel(Odd(), shard=mode)
            window(net, make(net.parameters()))
            nets.append(net)
        expect_equal(nets[1], nets[0], "accumulate")


@run_on(4)
def test_gradients_are_kept() -> None:
    """`.grad` is this rank's rows of the mean, adds up over backwards, and is forgotten once it is zeroed."""
    plain, net = DistributedDataParallel(Odd()), DistributedDataParallel(Odd(), shard="gradients")

    def compare(what: str) -> None:
        for (name, a), b in zip(net.module.named_parameters(), plain.module.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), (what, name)
            if a.grad is not None:
                assert isinstance(a.grad, DTensor)
                assert a.grad.shape == a.shape
                torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=lambda t, name=name: f"{what} {name} {t}")

    def both(call: Callable[[Any], Any]) -> None:
        call(plain)
        call(net)

    both(lambda n: loss_of(n, 0).backward())
    compare("first")
    both(lambda n: loss_of(n, 1).backward())
    compare("added")
    losses = [loss_of(n, 2) for n in (plain, net)]
    both(lambda n: n.zero_grad())  # between forward and backward
    for loss in losses:
        loss.backward()
    compare("after zero_grad")
    both(lambda n: n.zero_grad(set_to_none=False))
    both(lambda n: loss_of(n, 3).backward())
    compare("after zeros")
    both(lambda n: sum(p.sum() for p in n.parameters() if p.requires_grad).backward())  # stays on its rank
    both(lambda n: loss_of(n, 4).backward())
    compare("after a backward past the wrapper")
    both(lambda n: torch.nn.utils.clip_grad_norm_(n.parameters(), 0.1))
    compare("clipped by torch")
    both(lambda n: drivetrain.clip_grad_norm_(n.parameters(), 0.05))
    compare("clipped by drivetrain")


@run_on(2)
def test_a_step_counts_gradients_of_backwards_past_the_wrapper() -> None:
    """A backward that stays on its rank and is the last before a step counts, too."""

    def each(net: Any, optimizer: Any, step: int) -> None:
        loss_of(net, step).backward()
        sum(0.1 * p.square().sum() for p in net.module.parameters() if p.requires_grad).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected, _ = train(OURS["SGD"], Odd(), each=each)
    for mode in MODES:
        found, _ = train(OURS["SGD"], Odd(), each=each, shard=mode)
        expect_close(found, expected, mode)


# ---- Scalers.


@run_on(2)
def test_scalers_skip_the_same_steps_on_every_rank() -> None:
    for scaler_kind in (torch.amp.GradScaler, drivetrain.amp.GradScaler):
        for make in (OURS["AdamW"], WITH_SUMS["clipped AdamW"], TORCHS["AdamW"]):
            for unscales in (False, True):
                results = []
                for mode in (None, *MODES):
                    scaler = scaler_kind(torch.get_default_device().type, init_scale=2.0**12, growth_interval=2)

                    def each(
                        net: Any, optimizer: Any, step: int, scaler: Any = scaler, unscales: bool = unscales
                    ) -> None:
                        loss = loss_of(net, step)
                        if step == 1 and dist.get_rank() == 1:
                            loss = loss * torch.inf
                        scaler.scale(loss).backward()
                        if unscales:
                            scaler.unscale_(optimizer)
                            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()

                    net, _ = train(make, Odd(), 4, each=each, shard=mode)
                    results.append((net, scaler.get_scale()))
                (expected, scale), *others = results
                for mode, (found, found_scale) in zip(MODES, others, strict=True):
                    what = (scaler_kind.__module__, unscales, mode)
                    assert found_scale == scale, (what, found_scale, scale)
                    expect_close(found, expected, what)


# ---- Errors.


@run_on(4)
def test_what_sharding_does_not_support_raises() -> None:
    refused = [
        ({"shard": "all"}, ValueError, "shard is 'all', expected one of"),
        ({"shard_group": dist.group.WORLD}, ValueError, "shard_group is given and shard is None"),
        ({"shard": "gradients", "static_graph": True}, NotImplementedError, "static_graph does not go together"),
        ({"shard": "gradients", "find_unused_parameters": True}, NotImplementedError, "pass shard='optimizer'"),
        ({"shard": "optimizer", "transport": "nccl"}, RuntimeError, "transport 'nccl' cannot be used"),
        ({"shard": "optimizer", "shard_group": 3}, ValueError, "expected the process group of this rank"),
    ]
    for options, kind, message in refused:
        with pytest.raises(kind, match=message):
            DistributedDataParallel(Odd(), **options)
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    pair = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="shard_group has the single rank 2, and 2 ranks elsewhere"):
        DistributedDataParallel(Odd(), shard="gradients", shard_group=pair if dist.get_rank() < 2 else alone)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    with pytest.raises(NotImplementedError, match="'weight' has strides"):
        DistributedDataParallel(model, shard="optimizer")
    sparse = nn.Embedding(4, 4, sparse=True)
    with pytest.raises(NotImplementedError, match="sparse"):
        DistributedDataParallel(sparse, shard="optimizer")

    net = DistributedDataParallel(Odd(), shard="gradients")
    with pytest.raises(NotImplementedError, match="communication hook"):
        net.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(NotImplementedError, match=r"join\(\) does not go together with shard="), net.join():
        pass
    with pytest.raises(NotImplementedError, match="belongs to a DistributedDataParallel with shard="):
        drivetrain.optim.AdamW(net.parameters()).step_in_backward(net)
    with pytest.raises(RuntimeError, match="sharded by another"):
        DistributedDataParallel(net.module, shard="optimizer")


class Whole(torch.optim.AdamW):
    """An optimizer whose step may need whole parameters."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@run_on(2)
def test_steps_that_sharding_does_not_support_raise() -> None:
    net = DistributedDataParallel(Odd(), shard="optimizer")
    loss_of(net, 0).backward()
    with pytest.raises(NotImplementedError, match="Whole may need whole parameters"):
        Whole(net.parameters()).step()
    with pytest.raises(NotImplementedError, match="got a closure"):
        torch.optim.SGD(net.parameters(), lr=1.0).step(lambda: 0.0)

    # A step that raises leaves pieces behind until the optimizer is used again.
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    optimizer.step()
    before = [id(param) for param in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    assert all(not isinstance(v, DTensor) for s in optimizer.state.values() for v in s.values())
    assert all(isinstance(key, int) for key in optimizer.state_dict()["state"])
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == before
    optimizer.step()

    net.module.embed.weight.data = net.module.embed.weight.data.clone()
    for kind in (torch.optim.SGD, drivetrain.optim.SGD):
        with pytest.raises(RuntimeError, match=r"'embed\.weight' has other memory"):
            kind(net.parameters(), lr=1.0).step()
    with pytest.raises(TypeError, match="copy its `module`"):
        net._sharding.__reduce__()
    net = DistributedDataParallel(Odd(), shard="optimizer")
    optimizer = drivetrain.optim.SGD(net.parameters(), lr=1.0)
    loss_of(net, 0).backward()
    optimizer.step()
    del net
    gc.collect()
    with pytest.raises(RuntimeError, match="was deleted: keep the wrapper"):
        optimizer.step()


@run_on(2)
def test_hooks_on_steps_see_whole_parameters() -> None:
    """Hooks on steps and schedulers see whole parameters, whenever they were added."""
    for make in (OURS["AdamW"], TORCHS["AdamW"]):
        net = DistributedDataParallel(Odd(), shard="optimizer")
        optimizer = make(net.parameters())
        seen: list[set[int]] = []

        def look(optimizer: Any, *_: Any, seen: list[set[int]] = seen) -> None:
            seen.append({id(param) for param in optimizer.param_groups[0]["params"]})

        optimizer.register_step_pre_hook(look)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for step in range(2):
            loss_of(net, step).backward()
            optimizer.step()
            scheduler.step()
            if step == 0:
                optimizer.register_step_pre_hook(look)
                optimizer.register_step_post_hook(look)
        assert len(seen) == 4
        assert all(ids == {id(param) for param in net.parameters()} for ids in seen)


@run_on(2)
def test_a_step_without_another_rank_raises() -> None:
    """Rank 1 leaves before it has stepped. The other rank's step must end with an error that names it."""
    if (alone := alone_before_a_step()) is None:
        return
    _, optimizer = alone
    with pytest.raises(RuntimeError, match="rank 1 has already deleted its DistributedDataParallel"):
        optimizer.step()


@run_on(2)
def test_buckets_are_scattered_and_gathered() -> None:
    """Each rank gets the mean of its own rows alone. Shared memory gathers in place."""
    rank = dist.get_rank()
    for transport in transports():
        net = DistributedDataParallel(nn.Linear(8, 40, bias=False), transport=transport, shard="gradients")
        optimizer = OURS["SGD"](net.parameters())
        net(torch.full((4, 8), 1.0 + rank)).sum().backward()
        (view,) = net.reducer.gradient_views()
        other_rows = view[:20] if rank == 1 else view[20:]
        assert not (other_rows == 6.0).any()  # 4 and 8 on the ranks
        assert (net.module.weight.grad.to_local() == 6.0).all()
        optimizer.step()
        (bucket,) = net._sharding._buckets
        work = net._sharding._comm.start_gather(bucket.flat.view(torch.int32), bucket.ranges)
        assert (work is None) == (transport == "torch")
        if work is not None:
            work.wait()


@run_on(2)
def test_one_rank_shares_nothing() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    net, optimizer = train(OURS["AdamW"], Odd(), shard="gradients", process_group=alone)
    assert not any(pieces.piece_of(param) for param in net.parameters())
    assert not any(isinstance(v, DTensor) for s in optimizer.state.values() for v in s.values())


def test_the_cases_for_gpus_exist() -> None:
    import shard_nccl_ranks
    from test_shard_gpu import CASES

    assert {case for _, cases in CASES.values() for case in cases} == set(shard_nccl_ranks.cases)
