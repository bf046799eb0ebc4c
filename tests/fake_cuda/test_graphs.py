"""Tests the stand-in's graphs: captured work runs only when replayed, and illegal calls end a capture."""

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("synchronized")


def test_capture_runs_nothing_and_replay_all() -> None:
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        y = x * 2
    assert x.tolist() == [0] * 4
    for number in range(1, 4):
        graph.replay()
        assert x.tolist() == [number] * 4
        assert y.tolist() == [2 * number] * 4


def test_branches_are_captured_too() -> None:
    x = torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 10
        z = x + 20
        torch.cuda.current_stream().wait_stream(side)
        total = y + z
    graph.replay()
    graph.replay()
    assert total.tolist() == [34] * 4


@pytest.mark.fake_cuda_errors
def test_races_between_branches_are_found(new_errors: Callable[[], list[str]]) -> None:
    x = torch.zeros(4, device="cuda")
    # torch has 32 streams per device, and hands them out in turn: one alone may be the stream of all captures.
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        x.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
    assert not new_errors()
    graph.replay()
    assert "of a graph" in new_errors()[0]


def test_random_numbers_differ_from_replay_to_replay() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.rand(100, device="cuda")
    graph.replay()
    first = x.clone()
    graph.replay()
    assert not torch.equal(first, x)


@pytest.mark.parametrize("call", ["item", "synchronize", "unjoined", "outside"])
def test_illegal_calls_end_a_capture(call: str) -> None:
    x = torch.zeros(4, device="cuda")
    # torch's own stream for captures may be one of these, as there are 32 in all.
    main, side, other = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    event = other.record_event()
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph, pool, main):  # noqa: PT012
        x.add_(1)
        if call == "item":
            x.sum().item()
        elif call == "synchronize":
            torch.cuda.synchronize()
        elif call == "unjoined":
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)
        elif call == "outside":
            torch.cuda.current_stream().wait_event(event)
    torch._C._cuda_endAllocateToPool(0, pool)  # torch leaves it open, and then keeps all cached memory
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert x.tolist() == [0] * 4  # the device still works


def test_memory_in_a_relaxed_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        x = torch.ones(30 << 20, device="cuda")
    graph.replay()
    assert x.sum().item() == 30 << 20
