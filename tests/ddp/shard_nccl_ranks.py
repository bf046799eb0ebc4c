"""Runs one rank of sharded wrappers under a pure "nccl" group, on GPUs or on tests/fake_cuda.

python shard_nccl_ranks.py RANK SIZE STORE TRANSPORT CASE ...; prints "ok CASE" after each case that holds. Most cases
are those of the CPU's tests, on another default device.
"""

import copy
import functools
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shard_cases
import test_shard
import test_shard_gathers
import test_shard_scatter
import test_shard_windows
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shard_cases import OURS, Blocks, Odd, Whole, drawn, expect_equal, loss_of, train, transports, whole_loss
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import drivetrain
from drivetrain import DistributedDataParallel
from drivetrain.checkpointing import Checkpointer
from drivetrain.optim import full_state_dict
from nccl_ranks import join_group
from optim import test_muon_ranks

MODES = ("optimizer", "gradients")
FEW_OF_TORCHS = ("AdamW", "Adagrad", "SGD")  # each step of an optimizer takes long on the stand-in

try:
    import fake_cuda
except ModuleNotFoundError:  # a GPU
    fake_cuda = None

cases: dict[str, Callable[[], Any]] = {
    "bits": test_shard.test_element_wise_steps_have_the_bits_of_the_unsharded_wrapper,
    "formats": test_shard.test_storage_formats_have_the_same_bits_where_parts_are_whole_blocks,
    "sums": test_shard.test_rules_with_sums_over_parameters_agree_with_the_unsharded_wrapper,
    "muon": test_shard.test_muon_agrees_with_the_unsharded_wrapper,
    "shared_matrices": functools.partial(test_muon_ranks.whole_matrices, 2),
    "shared_rows": functools.partial(test_muon_ranks.rows, (2,)),
    "moves_between_steps": test_shard.test_parameters_that_move_between_steps_are_gathered,
    "unsharded_states": test_shard.test_states_of_unsharded_steps_are_divided,
    "accumulation": test_shard.test_gradients_are_collected_and_clipped,
    "kept_gradients": test_shard.test_gradients_are_kept,
    "penalty": test_shard.test_a_step_counts_gradients_of_backwards_past_the_wrapper,
    "scalers": test_shard.test_scalers_skip_the_same_steps_on_every_rank,
    "main_grads_and_states": test_shard.test_main_grads_work_with_sharded_states,
    "main_grads": test_shard_windows.test_main_gradients_are_kept_as_float32_rows,
    "windows": test_shard_windows.test_windows_have_the_bits_of_the_unsharded_wrapper,
    "clipped_windows": test_shard_windows.test_clipped_windows_have_the_bits_of_the_unsharded_wrapper,
    "restored_windows": test_shard_windows.test_a_window_continues_from_restored_rows,
    "weights": test_shard_windows.test_weighted_backwards_keep_sums_until_the_last,
    "losses_from_elsewhere": test_shard_windows.test_losses_from_elsewhere_keep_sums_until_the_last,
    "shard_groups": test_shard.test_a_shard_group_has_a_set_of_states_of_its_own,
    "windows_of_shard_groups": test_shard_windows.test_windows_with_a_shard_group,
}


def case(function: Callable[[], None]) -> Callable[[], None]:
    cases[function.__name__] = function
    return function


@case
def scatters() -> None:
    """Rows that ranks divide evenly, unevenly and not at all, with scalars between them, in small and large buckets."""
    for dtype in (torch.float32, torch.bfloat16):
        for cap in (0.1, 1.0):
            plain, net = (
                DistributedDataParallel(
                    test_shard_scatter.Sizes(dtype, test_shard_scatter.ALL_SIZES), bucket_cap_mb=cap, shard=mode
                )
                for mode in (None, "gradients")
            )
            if shard_cases.is_exact:
                test_shard_scatter.assert_equal_bits(plain, net, (dtype, cap))
            else:
                for model in (plain, net):
                    model(dist.get_rank()).backward()
            optimizers = [OURS["AdamW"](model.parameters()) for model in (plain, net)]
            for optimizer in optimizers:
                optimizer.step()
            expect_equal(net, plain, (dtype, cap))


@case
def one_rank() -> None:
    for mode in MODES:
        net, _ = train(OURS["AdamW"], Odd(), shard=mode, overlap_gather=True)
        expected, _ = train(OURS["AdamW"], Odd())
        assert net._sharding is None
        expect_equal(net, expected, mode)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(4, 0))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.scale + self.nothing.sum()


@case
def scalars_alone() -> None:
    """Nothing is divided, scattered or gathered."""
    expected, _ = train(OURS["AdamW"], Scalar())
    for mode in MODES:
        for overlaps in (False, True):
            found, _ = train(OURS["AdamW"], Scalar(), shard=mode, overlap_gather=overlaps)
            expect_equal(found, expected, (mode, overlaps))


@case
def default_buckets() -> None:
    expected, found = (DistributedDataParallel(Odd(), shard=mode) for mode in (None, "gradients"))
    for net in (expected, found):
        optimizer = OURS["AdamW"](net.parameters())
        for step in range(3):
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    expect_equal(found, expected, "default buckets")


@case
def overlapped_gathers() -> None:
    test_shard_gathers.divide_into(1024)
    expected, _ = train(OURS["AdamW"], Odd())
    for mode in MODES:
        found, optimizer = train(OURS["AdamW"], Odd(), shard=mode, overlap_gather=True)
        assert len(found._sharding._buckets) > 3
        assert found._sharding.gathers.pending  # the last step's
        expect_equal(found, expected, mode)
        found.wait_for_parameters()
        assert not found._sharding.gathers.pending
        del found, optimizer


@case
def uses_on_other_streams() -> None:
    """Each stream that uses gathered parameters waits for them, whichever used them first."""
    test_shard_gathers.divide_into(1024)
    plain, net = (
        DistributedDataParallel(
            nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), shard=mode, overlap_gather=bool(mode)
        )
        for mode in (None, "optimizer")
    )
    net.module.load_state_dict(plain.module.state_dict())
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = drawn(0, -3, 4, 2, 32).float()
    outputs: list[list[Tensor]] = []
    for model in (plain, net):
        optimizer = OURS["AdamW"](model.parameters())
        outputs.append([])
        for _ in range(3):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            for stream in reversed(streams):
                with torch.cuda.stream(stream), torch.no_grad():
                    outputs[-1].append(model.module(inputs))
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@case
def steps_on_a_side_stream() -> None:
    nets = []
    for mode in (None, *MODES):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, on the streams of accumulators
            nets.append(train(OURS["AdamW"], Odd(), shard=mode)[0])
        torch.cuda.current_stream().wait_stream(stream)
    for net in nets[1:]:
        expect_equal(net, nets[0], "side stream")


class Recurrent(nn.Module):
    """Stands for an LSTM, for which the stand-in has no kernel."""

    def __init__(self, inputs: int, outputs: int, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return self.inner(hidden), None


@case
def uses() -> None:
    if fake_cuda is not None:
        test_shard_gathers.nn.LSTM = Recurrent
    test_shard_gathers.divide_into(1024)
    test_shard_gathers.TOKENS = test_shard_gathers.TOKENS.cuda()
    inspect.unwrap(test_shard_gathers.test_uses_wait_for_the_rows_of_other_ranks)()


@case
def late_misuse() -> None:
    """The host learns of wrong weights in a later backward, as it waits for no device."""
    net = DistributedDataParallel(Whole(), shard="gradients")
    whole_loss(net, 0).backward()
    net.backward(whole_loss(net, 1), weight=1)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"found gradients that no weight counts.* It was an earlier backward"):
        net.backward(whole_loss(net, 2), weight=1)
    net.zero_grad()
    with net.no_sync():
        net.backward(whole_loss(net, 2), weight=1)
    with pytest.raises(ValueError, match="this backward has no weight, but the gradients that it adds to"):
        whole_loss(net, 3).backward()
    net.zero_grad()
    with pytest.raises(ValueError, match=r"sum to 0\.0 over all ranks"):
        net.backward(whole_loss(net, 4), weight=0)
    net.zero_grad()
    net.backward(whole_loss(net, 6), weight=2)
    plain = DistributedDataParallel(Whole())
    plain.backward(whole_loss(plain, 6), weight=2)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad.full_tensor(), b.grad)


@case
def whole_states() -> None:
    """Whole states come to one rank, or to all, and go on in an optimizer of whole parameters."""

    def make(params: Any) -> torch.optim.Optimizer:
        return drivetrain.optim.AdamW(params, lr=1e-2)

    plain, of_plain = train(make, Blocks(), vocabulary=16)
    net, optimizer = train(make, Blocks(), vocabulary=16, shard="gradients")
    expected = of_plain.state_dict()["state"]
    found = full_state_dict(optimizer)
    assert bool(found) == (dist.get_rank() == 0)
    for whole in ([found["state"]] if found else []) + [full_state_dict(optimizer, None)["state"]]:
        for key, values in expected.items():
            for name, value in values.items():
                assert torch.equal(whole[key][name], value.cpu()), (key, name)
    again = make(net.parameters())
    again.load_state_dict(copy.deepcopy(of_plain.state_dict()))
    for model, steps in ((plain, of_plain), (net, again)):
        loss_of(model, 7, 16).backward()
        steps.step()
    expect_equal(net, plain, "loaded")


def step_on(net: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(net, step, 16).backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(folder: Path, net: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Restores the run in the folder, or saves it if there is none. Returns whether it has restored one."""
    with torch.device("cpu"), Checkpointer(folder, model=net, optimizer=optimizer, every=None, signals=()) as ckpt:
        if ckpt.restored is None:
            ckpt.step()
        return ckpt.restored is not None


@case
def checkpoints() -> None:
    """Checkpointer and torch.distributed.checkpoint save each rank's rows, and a run continues from them."""
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    for mode in MODES:
        folder = Path(shared[0]) / mode
        net, optimizer = train(OURS["AdamW"], Blocks(), vocabulary=16, shard=mode)
        assert not checkpointed(folder, net, optimizer)
        model_state, optim_state = get_state_dict(net, optimizer)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder / "dcp")
        step_on(net, optimizer, range(3, 5))
        again, optimizer = train(OURS["AdamW"], Blocks(), 1, vocabulary=16, shard=mode)
        assert checkpointed(folder, again, optimizer)
        step_on(again, optimizer, range(3, 5))
        expect_equal(again, net, (mode, "Checkpointer"))
        again, optimizer = train(OURS["AdamW"], Blocks(), 1, vocabulary=16, shard=mode)
        model_state, optim_state = get_state_dict(again, optimizer)
        state = {"model": model_state, "optim": optim_state}
        dcp.load(state, checkpoint_id=folder / "dcp")
        set_state_dict(again, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step_on(again, optimizer, range(3, 5))
        expect_equal(again, net, (mode, "torch.distributed.checkpoint"))


@case
def host_waits() -> None:
    """A sharded step waits for the device no more often than one without `shard`."""
    if fake_cuda is None:
        return
    inputs = drawn(0, -3, 4, 4, 7).float()

    def waits(kind: str, **options: Any) -> int:
        net = DistributedDataParallel(Whole(), **options)
        clips = 1.0 if kind == "clipped" else None
        optimizer = drivetrain.optim.AdamW(net.parameters(), lr=1e-2, max_grad_norm=clips)
        for step in range(14):  # torch's class waits in its first ten forwards
            if step == 13:
                torch.cuda.synchronize()
                before = fake_cuda.num_host_waits()
            loss = net(inputs).square().mean()
            net.backward(loss, weight=3.0 if kind == "weighted" else None)
            optimizer.step()
            optimizer.zero_grad(set_to_none=kind != "weighted")
        return fake_cuda.num_host_waits() - before

    for kind in ("plain", "clipped", "weighted"):
        expected = waits(kind)
        for mode in MODES:
            for overlaps in (False, True):
                found = waits(kind, shard=mode, overlap_gather=overlaps)
                assert found <= expected, (kind, mode, overlaps, found, expected)


@case
def refusals() -> None:
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(NotImplementedError, match=r"'layers\.0\.weight' is on cuda:\d, for which .* backend is 'gloo'"):
        DistributedDataParallel(Whole(), shard="optimizer", transport="torch", process_group=gloo, init_sync=False)
    if transports() == ("torch",) and torch.cuda.device_count() > 1:
        two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=f"cuda:{1 - torch.cuda.current_device()}"))
        with pytest.raises(NotImplementedError, match="and shard= is for one device per rank"):
            DistributedDataParallel(two, shard="optimizer", init_sync=False)
    graph = torch.cuda.CUDAGraph()
    net = DistributedDataParallel(Whole(), shard="optimizer")
    optimizer = OURS["AdamW"](net.parameters())
    whole_loss(net, 0).backward()
    optimizer.step()
    with pytest.raises(NotImplementedError, match="a CUDA graph cannot capture a step"), torch.cuda.graph(graph):
        net._sharding.gather(list(net.parameters()))


def main() -> None:
    transport, chosen = join_group()
    os.environ["DRIVETRAIN_TRANSPORT"] = transport
    assert transports() == (transport,)
    shard_cases.is_exact = dist.get_world_size() <= 2 or fake_cuda is not None  # NCCL's own orders of sums differ
    for name in set(shard_cases.TORCHS) - set(FEW_OF_TORCHS):
        del shard_cases.TORCHS[name]
    torch.set_default_device("cuda")
    for name in chosen:
        inspect.unwrap(cases[name])()  # without what run_on adds to a test
        torch.cuda.synchronize()
        if fake_cuda is not None:
            assert not fake_cuda.num_errors(), "\n".join(fake_cuda.errors()[:5])
        print(f"ok {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
