"""Checks that collectives which do not belong together raise on every rank, name both steps, and sum nothing."""

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_cases import SMALL_BUCKETS, OnRanks, assert_equal_grads, inputs, linear_chain, make_net, message_of, pair
from drivetrain import DistributedDataParallel as DDP
from drivetrain.ddp import tag_board
from drivetrain.ddp import transport as transports
from effort import covering
from ranks import run_on

DIFFERENCE = "the ranks start different collectives: "
LARGE = 1e6


# "hosts": over the process group, each rank on a host of its own. "pairs": two ranks per host, in shared memory.
TRANSPORTS = ["torch", "shm", "hosts"]


@contextmanager
def over(transport: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRIVETRAIN_TRANSPORT", {"hosts": "torch", "pairs": "auto"}.get(transport, transport))
        if transport in ("hosts", "pairs"):
            ranks_per_host = 2 if transport == "pairs" else 1
            patch.setattr(transports, "host_identity", lambda: (str(dist.get_rank() // ranks_per_host),))
        yield


def close_connections() -> None:
    gc.collect()


@pytest.fixture(autouse=True)
def _close_connections(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frees what an error has left in cycles, and with it the groups.

    A collective that one rank has given up ends only then on the other, whose gloo thread must not free its own group.
    """
    pools = [request.getfixturevalue(name) for name in ("on_ranks", "on_four_ranks") if name in request.fixturenames]
    yield
    for on_pool in pools:
        on_pool(close_connections)


def loss_of(model: nn.Module, x: Tensor, *arguments: Any) -> Tensor:
    loss: Tensor = model(x, *arguments).abs().pow(2).sum()
    return loss


def step(model: nn.Module, x: Tensor) -> None:
    loss_of(model, x).backward()
    model.zero_grad()


# ---- A rank starts a step again, with buckets as large as those of the step before.


class Interrupted(RuntimeError):
    """Raised at the end of one rank's backward."""


def interrupt(_: Tensor) -> Tensor:
    raise Interrupted


def a_step_given_up_on_one_rank(dtype: torch.dtype, has_hook: bool = False) -> str:
    """Starts its next buckets, as large as the others', while another rank still has those of the step before.

    Rank 1 has large gradients in that step. Rank 0 starts its last buckets and must not get any of them.
    """
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4))).to(dtype)
    model = DDP(net, bucket_cap_mb=1e-6)  # a bucket each
    if has_hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(3):
        step(model, inputs().to(dtype))
    loss = loss_of(model, inputs().to(dtype))
    if dist.get_rank() == 1:
        handle = net[1].weight.register_hook(interrupt)
        with pytest.raises(Interrupted):
            loss.backward()
        handle.remove()
        model.reducer._reset_state()
        model.zero_grad()
        loss = loss_of(model, inputs().to(dtype)) * (LARGE if dtype is not torch.float16 else 1e4)
    message = message_of(RuntimeError, loss.backward)
    if dist.get_rank() == 0:
        own = [view for view in model.reducer.gradient_views()[:2] if view is not None]  # reduced last
        assert own
        assert all(grad.abs().max() < 1e3 for grad in own)
    return message


def given_up(transport: str, dtype: torch.dtype, has_hook: bool = False) -> str:
    with over(transport):
        return a_step_given_up_on_one_rank(dtype, has_hook)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def check_messages(messages: list[str], *parts: str) -> None:
    for message in messages:
        assert DIFFERENCE in message, message
        for part in ("rank 0", "rank 1", *parts):
            assert part in message, message


@pytest.mark.parametrize(("dtype", "transport"), covering(1, DTYPES, TRANSPORTS))
def test_a_step_given_up_on_one_rank(on_ranks: OnRanks, transport: str, dtype: torch.dtype) -> None:
    messages = on_ranks(given_up, transport, dtype)
    check_messages(messages, "bucket 2 in synchronized step 4", "bucket 0 in synchronized step 4")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_given_up_under_a_hook(on_ranks: OnRanks, transport: str) -> None:
    messages = on_ranks(given_up, transport, torch.float32, True)
    check_messages(messages, "bucket 2 for a communication hook in synchronized step 4")


# ---- A rank leaves out a collective besides the buckets.


def sparse() -> tuple[nn.Module, Tensor]:
    return DDP(nn.Embedding(20, 5, sparse=True)), torch.randint(20, (7,))


def dense() -> tuple[nn.Module, Tensor]:
    return DDP(linear_chain(), **SMALL_BUCKETS), inputs()


def complex_numbers() -> tuple[nn.Module, Tensor]:
    return DDP(nn.Linear(10, 3, bias=False).to(torch.complex64)), inputs().to(torch.complex64)


def on_the_wire() -> tuple[nn.Module, Tensor]:
    return DDP(linear_chain(), wire_dtype=torch.bfloat16, **SMALL_BUCKETS), inputs()


def static() -> tuple[nn.Module, Tensor]:
    return DDP(linear_chain(), static_graph=True, **SMALL_BUCKETS), inputs()


def hooked() -> tuple[nn.Module, Tensor]:
    model = DDP(linear_chain(), **SMALL_BUCKETS)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model, inputs()


def weight_on_one_rank(make: Callable[[], tuple[nn.Module, Tensor]], transport: str) -> str:
    with over(transport):
        model, x = make()
        for _ in range(2):
            step(model, x)

        def go_on() -> None:
            model.backward(loss_of(model, x), weight=2.0 if dist.get_rank() == 0 else None)  # type: ignore[operator]
            model.zero_grad()
            step(model, x)

        return message_of(RuntimeError, go_on)


MAKES = (dense, sparse, complex_numbers, static, hooked, on_the_wire)


@pytest.mark.parametrize(("make", "transport"), covering(1, MAKES, TRANSPORTS))
def test_a_weight_on_one_rank(on_ranks: OnRanks, make: Callable[[], tuple[nn.Module, Tensor]], transport: str) -> None:
    messages = on_ranks(weight_on_one_rank, make, transport)
    if make is hooked:
        check_messages(messages, "the weights in synchronized step 3", "bucket 0", "in synchronized step 4")
    else:
        step_3 = "in synchronized step 3"
        check_messages(messages, f"bucket 0 of weighted gradients {step_3}", f"bucket 0 {step_3}")


def go_forward_on_one_rank() -> str:
    """Broadcasts buffers in a forward that only rank 1 makes, while rank 0 reduces gradients."""
    model = DDP(make_net(), find_unused_parameters=True, **SMALL_BUCKETS)
    step(model, inputs())
    loss = loss_of(model, inputs())
    return message_of(RuntimeError, loss.backward if dist.get_rank() == 0 else lambda: model(inputs()))


def a_forward_on_one_rank(transport: str) -> str:
    with over(transport):
        message = go_forward_on_one_rank()
        gc.collect()  # closes the connections, which ends the other rank's broadcast
        return message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_forward_on_one_rank(on_ranks: OnRanks, transport: str) -> None:
    messages = on_ranks(a_forward_on_one_rank, transport)
    check_messages(messages, "the broadcast of buffers in synchronized step 2", "in synchronized step 2")


def two_models_in_other_orders(transport: str) -> str:
    with over(transport):
        models = [DDP(nn.Linear(10, 10)), DDP(nn.Linear(10, 10))]
        for model in models:
            step(model, inputs())
        return message_of(RuntimeError, lambda: step(models[dist.get_rank()], inputs()))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_models_in_other_orders(on_ranks: OnRanks, transport: str) -> None:
    messages = on_ranks(two_models_in_other_orders, transport)
    check_messages(messages, "the planning of buckets in synchronized step 2 of DistributedDataParallel")


def again_through_the_outputs(model: nn.Module, x: Tensor) -> None:
    """Runs a second backward of a rank's own, as for a saliency map."""
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()


def of_the_inner_module_first(model: nn.Module, x: Tensor) -> None:
    """Runs a backward of a rank's own between a forward and its backward. torch reduces it in place of the latter."""
    loss = loss_of(model, x)
    loss_of(model.module, x).backward()  # type: ignore[arg-type]
    model.zero_grad()
    loss.backward()


def of_a_forward_under_no_sync(model: DDP, x: Tensor) -> None:
    with model.no_sync():
        loss = loss_of(model, x)
    loss.backward()
    model.zero_grad()
    step(model, x)


def a_backward_on_one_rank(
    run: Callable[[nn.Module, Tensor], None], make: Callable[[], tuple[nn.Module, Tensor]], transport: str
) -> str:
    """One more backward than the other rank makes must not take the place of the other rank's next step."""
    with over(transport):
        model, x = make()

        def go_on() -> None:
            for number in range(6):
                (run if number == 3 and dist.get_rank() == 0 else step)(model, x)
                model.zero_grad()

        return message_of(RuntimeError, go_on)


RUNS = (again_through_the_outputs, of_the_inner_module_first, of_a_forward_under_no_sync)


@pytest.mark.parametrize(("run", "make", "transport"), covering(2, RUNS, (dense, sparse, hooked, static), TRANSPORTS))
def test_a_backward_on_one_rank(
    on_ranks: OnRanks,
    run: Callable[[nn.Module, Tensor], None],
    make: Callable[[], tuple[nn.Module, Tensor]],
    transport: str,
) -> None:
    messages = on_ranks(a_backward_on_one_rank, run, make, transport)
    step_of_both = 4 if run is of_a_forward_under_no_sync else 5
    check_messages(
        messages,
        f"of a second backward, or one whose forward ran under no_sync(), in synchronized step {step_of_both}",
        f" in synchronized step {step_of_both}",
    )


def weighted_backward_on_one_rank(
    make: Callable[[], tuple[nn.Module, Tensor]], runs_under_no_sync: bool, transport: str
) -> str:
    with over(transport):
        model, x = make()
        assert isinstance(model, DDP)

        def go_on() -> None:
            for number in range(6):
                on_its_own = number == 3 and dist.get_rank() == 0
                with model.no_sync() if on_its_own and runs_under_no_sync else nullcontext():
                    loss = loss_of(model, x)
                model.backward(loss, weight=2.0, retain_graph=on_its_own)
                model.zero_grad()
                if on_its_own and not runs_under_no_sync:
                    model.backward(loss, weight=2.0)
                    model.zero_grad()

        return message_of(RuntimeError, go_on)


@pytest.mark.parametrize(
    ("runs_under_no_sync", "make", "transport"), covering(2, (False, True), (dense, hooked, static), TRANSPORTS)
)
def test_a_weighted_backward_on_one_rank(
    on_ranks: OnRanks, make: Callable[[], tuple[nn.Module, Tensor]], runs_under_no_sync: bool, transport: str
) -> None:
    """Weighted backwards of two kinds raise on both ranks, although a rank of weight 0 may match either kind."""
    for message in on_ranks(weighted_backward_on_one_rank, make, runs_under_no_sync, transport):
        assert "the ranks ran different backwards: some backward(loss, weight=...) after a forward" in message
        step_of_both = 4 if runs_under_no_sync else 5
        assert f"In synchronized step {step_of_both}, 1 of the ranks did the former, and 1 the latter." in message


# ---- What works under torch raises nothing.


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("make", [dense, hooked])
@run_on(2)
def test_weighted_backwards_again(make: Callable[[], tuple[nn.Module, Tensor]], transport: str) -> None:
    """Every rank runs a second weighted backward, in which a rank of weight 0 takes part without a forward of its own.

    The gradients are those of rank 0, as only its loss has a weight.
    """
    with over(transport):
        model, x = make()
        assert isinstance(model, DDP)
        net = copy.deepcopy(model.module)
        for _ in range(3):
            if dist.get_rank() == 0:
                loss = loss_of(model, x)
                model.backward(loss, weight=3.0, retain_graph=True)
                model.zero_grad()
                model.backward(loss, weight=5.0)
            else:
                model.backward(x.sum(), weight=0)
                model.zero_grad()
                model.backward(x.sum(), weight=0)
            seen = [x if dist.get_rank() == 0 else torch.empty_like(x)]
            dist.broadcast_object_list(seen, src=0)
            net.zero_grad()
            loss_of(net, seen[0]).backward()
            for ours, theirs in zip(model.module.parameters(), net.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=1e-3)  # the hook sends float16
            model.zero_grad()


def two_models_and_two_groups(transport: str) -> None:
    """Steps two models in turns, one of them over a group of its own, in another order on each rank."""
    with over(transport):
        second = dist.new_group(list(range(dist.get_world_size())))
        torch.manual_seed(0)
        nets = [linear_chain() for _ in range(3)]
        groups = [None, None, second]
        models = [pair(net, process_group=group, **SMALL_BUCKETS) for net, group in zip(nets, groups, strict=True)]
        for number in range(6):
            x = inputs()
            for ours, theirs in (*models[:2], *models[:1]) if number % 2 else models:
                for model in (ours, theirs):
                    model.zero_grad()
                    with model.no_sync():
                        loss_of(model, x).backward()
                    loss_of(model, x).backward()
                assert_equal_grads(ours, theirs)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_models_and_two_groups(on_ranks: OnRanks, transport: str) -> None:
    on_ranks(two_models_and_two_groups, transport)


@run_on(2)
def test_a_hook_of_buffers_on_one_rank() -> None:
    """A hook that does not communicate may be called on one rank alone."""
    model = DDP(make_net(), **SMALL_BUCKETS)
    model._register_buffer_comm_hook(None, lambda state, buffers: None)
    for number in range(4):
        if dist.get_rank() == 0 and number % 2:
            with torch.no_grad():
                model(inputs())
        step(model, inputs())


def boards() -> list[bool]:
    """Returns if the ranks of each group have a board: one per group, for all wrappers."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for _ in range(2):
        for group in groups:
            DDP(nn.Linear(3, 3), process_group=group)
    return [tag_board._boards[group][torch.device("cpu")].has_all_ranks for group in groups]


def test_one_board_per_group(on_ranks: OnRanks) -> None:
    assert on_ranks(boards) == [[True, True]] * 2


@run_on(2)
def test_a_forked_child_starts_no_collective() -> None:
    with over("torch"):
        model = DDP(make_net())
        step(model, inputs())
        child = os.fork()
        if child == 0:
            try:
                model(inputs())  # would send buffers through its parent's connections
            except RuntimeError as error:
                os._exit(0 if "was forked from rank" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        step(model, inputs())


# ---- Hosts of several ranks.


def weight_on(odd: int, make: Callable[[], tuple[nn.Module, Tensor]], transport: str) -> str:
    with over(transport):
        model, x = make()
        for _ in range(2):
            step(model, x)
        loss, weight = loss_of(model, x), 2.0 if dist.get_rank() == odd else None
        return message_of(RuntimeError, lambda: model.backward(loss, weight=weight))  # type: ignore[operator]


@pytest.mark.parametrize("odd", [2, 3])
@pytest.mark.parametrize("make", [dense, sparse])
def test_a_weight_on_one_rank_of_another_host(
    on_four_ranks: OnRanks, make: Callable[[], tuple[nn.Module, Tensor]], odd: int
) -> None:
    """Rank 2 compares with the other host, rank 3 only with rank 2."""
    for message in on_four_ranks(weight_on, odd, make, "pairs"):
        assert DIFFERENCE in message, message
        assert "bucket 0 of weighted gradients in synchronized step 3" in message, message
        assert f"rank {odd} " in message, message


def test_two_hosts_of_two_ranks(on_four_ranks: OnRanks) -> None:
    on_four_ranks(two_models_and_two_groups, "pairs")


@run_on(2)
def test_a_late_host_is_waited_for() -> None:
    """One rank is late by more than a long wait, in a forward and in a backward; nothing differs."""
    with over("hosts"):
        model = DDP(make_net(), find_unused_parameters=True, **SMALL_BUCKETS)
        for number in range(4):
            is_late = dist.get_rank() == number % 2
            if is_late and number < 2:
                time.sleep(1.2)
            loss = loss_of(model, inputs())
            if is_late and number >= 2:
                handle = next(model.parameters()).register_hook(lambda grad: time.sleep(1.2))
                loss.backward()
                handle.remove()
            else:
                loss.backward()
            model.zero_grad()
