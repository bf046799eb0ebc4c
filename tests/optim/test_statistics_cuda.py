"""Tests what steps on a GPU measure against the same steps on the CPU, their bits, and that no step waits."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain.amp
from drivetrain import optim
from drivetrain.optim.statistics import ParameterStatistics
from optim_cases import CASES, copies, each_rule, make_params, set_grads
from precision_cases import PRECISIONS, everything, same_bits
from waits import no_waiting

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHAPES: list[Any] = [(0,), (), (1,), (17,), (1023,), (4097,), (3, 700), (30, 700), (70_000,)]


def on_gpu(params: list[Tensor]) -> list[Tensor]:
    return [param.detach().to(DEVICE, copy=True).requires_grad_() for param in params]


def assert_same_figures(ours: dict[str, ParameterStatistics], theirs: dict[str, ParameterStatistics]) -> None:
    """Compares with sums in another order."""
    assert list(ours) == list(theirs)
    for name, one in ours.items():
        torch.testing.assert_close([*vars(one).values()], [*vars(theirs[name]).values()], rtol=1e-12, atol=0, msg=name)


def check(ours: Any, start: list[Tensor], **options: Any) -> None:
    """Compares steps on both devices that scale gradients, clip them and zero them. Measuring changes no bits."""
    options |= {"max_grad_norm": 1.0, "zero_grads_in_step": True}
    sets = [copies(start), on_gpu(start), on_gpu(start)]
    on_cpu, on_device, unmeasured = optimizers = [ours(params, **options) for params in sets]
    here, there = (optimizer.statistics(every=1) for optimizer in (on_cpu, on_device))
    for step in range(3):
        set_grads(*sets)
        for params, optimizer in zip(sets, optimizers, strict=True):
            optimizer.grad_scale = torch.tensor(4.0, device=params[0].device)
            optimizer.step()
        assert here.latest is not None
        assert there.latest is not None
        assert there.latest.step == step + 1
        assert_same_figures(there.latest.parameters, here.latest.parameters)
        pairs = zip(everything(on_device), everything(unmeasured), strict=True)
        assert all(same_bits(one.cpu(), other.cpu()) for one, other in pairs)


@pytest.mark.parametrize(("case", "precision"), each_rule(("plain", "float64", *PRECISIONS)))
def test_figures_are_those_of_the_cpu(case: str, precision: str) -> None:
    ours, _, options = CASES[case]
    dtype = torch.float32 if precision.startswith("state") else torch.bfloat16
    start = make_params(torch.float64 if precision == "float64" else dtype, SHAPES)
    check(ours, start, **options, **PRECISIONS.get(precision, {}), min_8bit_size=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_measures_the_whole_step(dtype: torch.dtype) -> None:
    check(optim.Adafactor, make_params(dtype, [(70, 100), (5, 7), (3, 30, 70), (33,)]), lr=0.1)


def test_formats_of_all_kinds_keep_their_random_bits() -> None:
    """Some have a kernel of their own in a step that does not measure, and others have none."""
    start = [*make_params(torch.bfloat16, [(3000,), (17,)]), *make_params(torch.float32, [(64,)])]
    sets = [on_gpu(start), on_gpu(start)]
    measured, unmeasured = (optim.AdamW(params, lr=1e-3, rounding="stochastic") for params in sets)
    measured.statistics(every=2)
    for _ in range(4):
        set_grads(*sets)
        for optimizer in (measured, unmeasured):
            torch.manual_seed(1)
            optimizer.step()
        assert all(same_bits(one.cpu(), other.cpu()) for one, other in zip(*sets, strict=True))


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_measures_does_not_wait(every: int) -> None:
    params = on_gpu(make_params(torch.bfloat16))
    optimizer = optim.AdamW(params, max_grad_norm=1.0, master_bits=24, state_bits=8)
    statistics = optimizer.statistics(every=every)
    set_grads(params)
    optimizer.step()
    with no_waiting():
        for _ in range(4):
            optimizer.step()
            assert statistics.arrived is None or statistics.arrived.step < 5
    assert statistics.latest is not None
    assert statistics.latest.step == 5
    assert statistics.arrived is statistics.latest


def test_steps_in_backward_do_not_wait_for_their_clipping() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30)).to(DEVICE)
    optimizer = optim.AdamW(model.parameters())
    statistics = optimizer.statistics(every=1)
    optimizer.step_in_backward(model, clip_by_previous_norm=0.5)
    x = torch.ones(4, 30, device=DEVICE)
    for step in range(3):
        with no_waiting() if step > 0 else nullcontext():
            model(x).square().sum().backward()
            optimizer.step()
    assert statistics.latest is not None
    assert statistics.latest.step == 3


def test_a_skipped_step_measures_nothing() -> None:
    """Only the device knows that the step was skipped, so that the host has counted it."""
    params = on_gpu(make_params())
    optimizer = optim.AdamW(params)
    statistics = optimizer.statistics(every=2)
    scale = drivetrain.amp.GradScaler(DEVICE, init_scale=4.0)
    for grad, measured in ((math.inf, None), (1.0, None), (1.0, 3), (1.0, 3), (math.nan, 3)):
        scale.scale(torch.ones((), device=DEVICE))
        for param in params:
            param.grad = torch.full_like(param, grad)
        scale.step(optimizer)
        scale.update()
        assert (statistics.latest and statistics.latest.step) == measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_that_are_not_finite_are_counted(dtype: torch.dtype) -> None:
    param = torch.ones(5000, dtype=dtype, device=DEVICE).requires_grad_()
    param.grad = torch.full_like(param, -2.0)
    param.grad[[0, 700, 4999]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype, device=DEVICE)
    optimizer = optim.SGD([param], lr=0.1)
    statistics = optimizer.statistics()
    optimizer.step()
    assert statistics.latest is not None
    found = statistics.latest.of()
    assert (found.num_not_finite, found.largest_grad) == (3, 2.0)
    assert math.isnan(found.grad_norm)


def test_a_captured_step_measures_nothing() -> None:
    params = on_gpu(make_params())
    optimizer = optim.AdamW(params, capturable=True)
    set_grads(params)
    optimizer.step()
    statistics = optimizer.statistics(every=1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    assert statistics.latest is None
    optimizer.step()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # Reads what is pending only later.
        optimizer.step()
        assert statistics.arrived is None
        assert statistics.latest is None
    assert statistics.latest is not None


def test_what_is_not_measured_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 4, device=DEVICE))
    with pytest.raises(NotImplementedError, match="measures Muon's steps on the CPU only"):
        optim.Muon([weight]).statistics()
    with pytest.raises(NotImplementedError, match="measures no steps of offload='cpu'"):
        optim.AdamW([weight], offload="cpu").statistics()
