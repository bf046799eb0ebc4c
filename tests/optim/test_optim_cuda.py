"""Tests steps on a GPU: the CPU's bits for a whole step, no wait for the device, loss scalers and CUDA graphs.

tests/native/cuda_tests.cpp compares the kernels themselves with the CPU's loops on every machine.
"""

import copy
import ctypes
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import drivetrain.amp
from drivetrain import optim
from optim_cases import ADAFACTOR_PRECISIONS as ADAFACTORS_PRECISIONS
from optim_cases import ADAFACTOR_SHAPES as MATRICES
from optim_cases import CASES, assert_same, cases, copies, each_rule, make_params, set_grads
from precision_cases import PRECISIONS, everything, same_bits
from waits import no_waiting

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def on_gpu(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().to(DEVICE, copy=True).requires_grad_() for p in params]


def pair(
    ours: type, options: dict[str, Any], dtype: torch.dtype = torch.float32, shapes: list[Any] | None = None
) -> tuple[Any, Any]:
    """Returns equal optimizers over equal parameters on the CPU and on the GPU."""
    params = make_params(dtype) if shapes is None else make_params(dtype, shapes)
    return ours(params, **options), ours(on_gpu(params), **options)


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def largest(params: list[Tensor]) -> Tensor:
    return max(params, key=Tensor.numel)


def assert_same_bits(on_cpu: Any, on_device: Any) -> None:
    found = everything(on_device)
    copied = torch.cat([each.reshape(-1).view(torch.uint8) for each in found]).cpu()  # waits once
    parts = copied.split([each.nbytes for each in found])
    for a, b, part in zip(everything(on_cpu), found, parts, strict=True):
        assert same_bits(a, part.clone().view(b.dtype).view(b.shape))


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize(("case", "max_norm", "zero", "dtype"), each_rule((0.5, math.inf), (False, True), DTYPES))
def test_treated_gradients_give_the_cpus_bits(case: str, max_norm: float, zero: bool, dtype: torch.dtype) -> None:
    ours, _, options = CASES[case]
    optimizers = pair(ours, {**options, "max_grad_norm": max_norm, "zero_grads_in_step": zero}, dtype)
    for _ in range(3):
        set_grads(*map(params_of, optimizers))
        for optimizer in optimizers:
            optimizer.grad_scale = torch.tensor(4.0, device=params_of(optimizer)[0].device)
            optimizer.step()
        assert optimizers[0].grad_norm == optimizers[1].grad_norm
        assert_same_bits(*optimizers)
        for a, b in zip(*map(params_of, optimizers), strict=True):
            assert same_bits(a.grad, b.grad.cpu())


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_overflow_leaves_everything_as_it_was(zero: bool, precision: str) -> None:
    params = on_gpu(make_params(torch.bfloat16))
    optimizer = optim.AdamW(params, max_grad_norm=1.0, zero_grads_in_step=zero, **PRECISIONS[precision])
    set_grads(params)
    optimizer.step()
    before = copy.deepcopy(everything(optimizer))
    set_grads(params)
    largest(params).grad.view(-1)[0] = math.inf
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.grad_norm == math.inf
    assert all(same_bits(a, b) for a, b in zip(everything(optimizer), before, strict=True))
    assert not zero or not any(param.grad.any() for param in params)
    set_grads(params)
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert optimizer.state[params[0]]["step"] == 2


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0])
def test_any_found_inf_above_0_counts(value: float) -> None:
    """torch's kernels compare found_inf with 1, but several devices add up to 2."""
    params = on_gpu(make_params())
    optimizer = optim.AdamW(params)
    set_grads(params)
    optimizer.found_inf = torch.tensor(value, device=DEVICE)
    before = copies(params)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True)) == (value > 0)
    assert optimizer.state[params[0]]["step"] == (0 if value > 0 else 1)


@cases
def test_a_step_does_not_wait_for_the_device(case: str) -> None:
    ours, _, options = CASES[case]
    optimizer = pair(ours, {**options, "max_grad_norm": 1.0, "zero_grads_in_step": True})[1]
    set_grads(params_of(optimizer))
    optimizer.step()
    with no_waiting():
        for _ in range(3):
            optimizer.step()


@pytest.mark.parametrize(("case", "precision"), each_rule(["as_it_is", *PRECISIONS]))
def test_a_first_step_does_not_wait_for_the_device_either(case: str, precision: str) -> None:
    """The first step makes the states, and the second one converts them."""
    ours, _, options = CASES[case]
    whole = {**options, **PRECISIONS.get(precision, {}), "min_8bit_size": 0, "max_grad_norm": 1.0}
    on_cpu, on_device = pair(ours, whole, torch.bfloat16)
    set_grads(params_of(on_cpu), params_of(on_device))
    for _ in range(2):
        on_cpu.step()
        with no_waiting():
            on_device.step()
        assert_same_bits(on_cpu, on_device)
        for optimizer in (on_cpu, on_device):
            optimizer.param_groups[0].update({"state_bits": 16, "master_bits": None, "rounding": "kahan"})


def test_numbers_in_tensors_on_the_device_are_read() -> None:
    """The host waits for every number but the learning rate, as it does for torch's fused optimizers."""
    on_cpu, on_device = pair(optim.AdamW, {"betas": (0.75, 0.875), "weight_decay": 0.25})
    (group,) = on_device.param_groups
    group["betas"] = tuple(torch.tensor(beta, device=DEVICE) for beta in group["betas"])
    group["weight_decay"] = torch.tensor(0.25, device=DEVICE)
    for _ in range(2):
        set_grads(params_of(on_cpu), params_of(on_device))
        on_cpu.step()
        on_device.step()
        assert_same_bits(on_cpu, on_device)
    group["weight_decay"] = torch.tensor(-0.25, device=DEVICE)
    with pytest.raises(ValueError, match=r"weight_decay is -0.25, expected a finite number, 0 or above"):
        on_device.step()


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, drivetrain.amp.GradScaler])
def test_a_scaler_does_not_wait_either_and_scales_as_torchs(scaler_class: type) -> None:
    params = on_gpu(make_params())
    references = copies(params)
    ours, theirs = optim.AdamW(params, fused=True), torch.optim.AdamW(references, fused=True)
    scaler, reference_scaler = (
        cls(DEVICE, init_scale=8.0, growth_interval=2) for cls in (scaler_class, torch.amp.GradScaler)
    )
    for each in (scaler, reference_scaler):
        each.scale(torch.ones((), device=DEVICE))

    def step(overflows: bool) -> None:
        set_grads(params, references)
        for some in (params, references):
            for param in some:
                param.grad.mul_(8.0)
            if overflows:
                largest(some).grad.view(-1)[0] = math.nan
        with no_waiting():
            scaler.step(ours)
            scaler.update()
        reference_scaler.step(theirs)
        reference_scaler.update()
        assert scaler.get_scale() == reference_scaler.get_scale()
        assert_same(params, references, rtol=3e-6, atol=3e-6)

    set_grads(params)
    ours.found_inf = torch.ones((), device=DEVICE)  # This step makes the states.
    ours.step()
    del ours.found_inf
    for overflows in (False, True, False, False):
        step(overflows)
    assert ours.state[params[0]]["step"] == 3


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("precision", ["as_it_is", *PRECISIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_captured_step_is_the_cpus(precision: str, dtype: torch.dtype) -> None:
    options = PRECISIONS.get(precision, {})
    if dtype == torch.float16 and options.get("master_bits") == 24:
        pytest.skip("24 bits are for bfloat16 parameters")
    on_cpu, on_device = pair(optim.AdamW, {**options, "min_8bit_size": 0, "max_grad_norm": 1.0}, dtype)
    on_device.param_groups[0]["lr"] = lr = torch.tensor(
        on_cpu.param_groups[0]["lr"], device=DEVICE, dtype=torch.float64
    )
    cpu_params, params = params_of(on_cpu), params_of(on_device)
    set_grads(cpu_params, params)
    on_cpu.step()
    on_device.step()
    graph = captured(on_device.step)
    for rate in (1e-3, 1e-2, 1e-2):
        fresh = [torch.empty_like(param) for param in cpu_params]
        for param, other, grad in zip(cpu_params, params, fresh, strict=True):
            param.grad = grad.normal_().to(param.grad.dtype)
            other.grad.copy_(param.grad)
        lr.fill_(rate)
        on_cpu.param_groups[0]["lr"] = rate
        on_cpu.step()
        graph.replay()
        assert on_cpu.grad_norm == on_device.grad_norm
        assert_same_bits(on_cpu, on_device)
    for optimizer in (on_cpu, on_device):  # Both step outside of the graph again.
        optimizer.step()
    assert_same_bits(on_cpu, on_device)


def test_tables_follow_every_change() -> None:
    """A step keeps the last step's tables only where nothing has changed since, not even in a step that failed."""
    on_cpu, on_device = pair(optim.AdamW, {})
    sides = [(optimizer, params_of(optimizer)) for optimizer in (on_cpu, on_device)]
    kept: list[Tensor | None] = []  # Old gradients keep their memory, so that a step that reads it is seen.

    def renew(number: int) -> None:
        for _, params in sides:
            kept.extend(param.grad for param in params)
            for i, param in enumerate(params[:-1]):  # The last one fails a step, after the others have been read.
                param.grad = torch.full_like(param, 0.1 * (number + i))

    def step() -> None:
        for optimizer, _ in sides:
            optimizer.step()
        assert_same_bits(on_cpu, on_device)

    for _, params in sides:
        params[-1].grad = torch.ones_like(params[-1])
    renew(1)
    step()
    step()
    renew(2)
    step()
    renew(3)
    for optimizer, params in sides:
        mean = optimizer.state[params[-1]]["exp_avg"]
        optimizer.state[params[-1]]["exp_avg"] = mean.new_zeros(mean.numel() + 1)
        with pytest.raises(TypeError, match="exp_avg"):
            optimizer.step()
        optimizer.state[params[-1]]["exp_avg"] = mean
    step()
    for _, params in sides:
        kept.append(params[1].grad)
        params[1].grad = None
    step()
    renew(4)
    step()
    graph = captured(on_device.step)
    graph.replay()
    on_cpu.step()
    del graph
    step()


def num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    assert torch.version.cuda is not None
    runtime = ctypes.CDLL("libcudart.so." + torch.version.cuda.split(".")[0])
    number = ctypes.c_size_t()
    assert runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(number)) == 0
    return number.value


@pytest.mark.parametrize(
    ("dtype", "options", "launches"),
    [
        (torch.float32, {}, 1),
        (torch.float32, {"state_bits": 8}, 2),
        (torch.bfloat16, {"state_bits": 32}, 1),
        (torch.bfloat16, {"state_bits": 16}, 1),
        (torch.bfloat16, {"state_bits": 8}, 2),  # one chooses formats at run time
        (torch.bfloat16, {"master_bits": 32, "state_bits": 32}, 1),
        (torch.bfloat16, {"master_bits": 32, "state_bits": 16}, 1),
        (torch.bfloat16, {"master_bits": 32, "state_bits": 8}, 2),
        (torch.bfloat16, {"master_bits": 24, "state_bits": 8}, 2),
        (torch.bfloat16, {"master_bits": 24, "state_bits": 4}, 2),  # one chooses formats at run time
        (torch.float16, {"master_bits": 32}, 1),
    ],
)
def test_every_layout_has_its_launches(dtype: torch.dtype, options: dict[str, Any], launches: int) -> None:
    """Vectors and small matrices keep float32 states where others have 8 bits, and so have a kernel of their own."""
    optimizer = pair(optim.AdamW, options, dtype, [(64, 64), (64,), (64, 192), (192,), (7, 64)])[1]
    set_grads(params_of(optimizer))
    optimizer.step()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        optimizer.step()
    assert num_nodes(graph) == 1 + launches


@pytest.mark.parametrize("number", [4, 400])
def test_a_captured_step_copies_no_table(number: int) -> None:
    """The table of many parameters is copied at the capture, and freed with the graph."""
    on_cpu, on_device = pair(optim.AdamW, {}, shapes=[(3, 5 + i % 4) for i in range(number)])
    set_grads(params_of(on_cpu), params_of(on_device))
    on_device.step()
    used = []
    for _ in range(3):
        graph = None  # the one before
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            on_device.step()
        assert num_nodes(graph) == 2  # the start and one kernel
        used.append(torch.cuda.memory_allocated())
    graph.replay()
    assert used[1] == used[2]
    for _ in range(2):
        on_cpu.step()
    assert_same_bits(on_cpu, on_device)


def test_a_step_after_the_capture_of_other_parameters_is_the_cpus() -> None:
    """A captured step's blocks end with its graph, and the blocks of the step before it are of fewer parameters."""
    optimizers = on_cpu, on_device = pair(optim.AdamW, {}, shapes=[(70, 70), (3, 5), (300, 17), (5000,)])
    for has_all in (True, False):
        set_grads(*map(params_of, optimizers))
        for optimizer in optimizers:
            for param in params_of(optimizer)[1:]:
                param.grad = param.grad if has_all else None
            optimizer.step()
    set_grads(*map(params_of, optimizers))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_device.step()
    on_device.step()
    graph.replay()
    for _ in range(2):
        on_cpu.step()
    assert_same_bits(on_cpu, on_device)


@cases
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("as_it_is", torch.float32),
        ("as_it_is", torch.float64),
        *((precision, torch.bfloat16) for precision in PRECISIONS),
    ],
)
def test_every_rule_in_every_storage_can_be_captured(case: str, precision: str, dtype: torch.dtype) -> None:
    """Captures a step, in which a wait for the device would raise."""
    ours, _, options = CASES[case]
    whole = {**options, **PRECISIONS.get(precision, {}), "min_8bit_size": 0, "zero_grads_in_step": True}
    on_cpu, on_device = pair(ours, {**whole, "max_grad_norm": 1.0}, dtype)
    cpu_params, params = params_of(on_cpu), params_of(on_device)
    set_grads(cpu_params, params)
    on_cpu.step()
    on_device.step()
    graph = captured(on_device.step)
    for _ in range(2):  # the states hold the bits of all steps
        for param, other in zip(cpu_params, params, strict=True):
            other.grad.copy_(param.grad.normal_())
        on_cpu.step()
        graph.replay()
        assert not any(other.grad.any() for other in params)
    assert_same_bits(on_cpu, on_device)


def step_both(on_cpu: Any, on_device: Any, graph: Any, overflows: bool) -> None:
    """Steps both optimizers. Only the one on the CPU warns of an overflow, because the other one must not wait."""
    with no_waiting():
        if graph is not None:
            graph.replay()
        else:
            on_device.step()
    with pytest.warns(UserWarning, match="the step was left out") if overflows else nullcontext():
        on_cpu.step()


@pytest.mark.parametrize("precision", ADAFACTORS_PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_adafactor_gives_the_cpus_bits(precision: str, dtype: torch.dtype) -> None:
    """Covers factors of every shape, a step that overflows, no wait, and replays of a graph that count steps."""
    options = ADAFACTORS_PRECISIONS[precision]
    if (dtype == torch.float16 and options.get("master_bits")) or (dtype == torch.float64 and "state_bits" in options):
        pytest.skip("not for this dtype")
    on_cpu, on_device = pair(optim.Adafactor, {**options, "max_grad_norm": 1.0}, dtype, MATRICES)
    cpu_params, params = params_of(on_cpu), params_of(on_device)
    set_grads(cpu_params, params)
    graph = None
    for step in range(6):
        for param, other in zip(cpu_params, params, strict=True):
            param.grad.normal_()
            if step == 2:
                param.grad.view(-1)[0] = math.inf
            other.grad.copy_(param.grad)
        if step == 3:
            graph = captured(on_device.step)
        step_both(on_cpu, on_device, graph, overflows=step == 2)
        assert on_cpu.grad_norm == on_device.grad_norm
        assert_same_bits(on_cpu, on_device)


@pytest.mark.parametrize("beta2", [None, 0.9])
@pytest.mark.parametrize("precision", [{}, *PRECISIONS.values(), {"rounding": "stochastic"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_muon_is_the_cpus_but_for_its_products(
    precision: dict[str, Any], dtype: torch.dtype, beta2: float | None
) -> None:
    """The momentum has the CPU's bits: with clipping, after an overflow, and in a graph that reads the rate."""
    if dtype == torch.float16 and precision.get("master_bits") == 24:
        pytest.skip("24 bits are for bfloat16 parameters")
    options = {**precision, "min_8bit_size": 0, "max_grad_norm": 0.5, "weight_decay": 0.0}
    shapes: list[Any] = [(64, 48), (48, 64), (300, 70), (64, 48), (7, 1), (0, 4)]
    on_cpu, on_device = pair(optim.Muon, options, dtype, shapes)
    on_device.param_groups[0]["lr"] = lr = torch.tensor(on_cpu.param_groups[0]["lr"], device=DEVICE)
    for optimizer in (on_cpu, on_device):
        optimizer.param_groups[0]["beta2"] = beta2
    cpu_params, params = params_of(on_cpu), params_of(on_device)
    set_grads(cpu_params, params)
    graph = None
    for step in range(6):
        for param, other in zip(cpu_params, params, strict=True):
            param.grad.normal_()
            if step == 2 and param.numel() > 0:
                param.grad[0, 0] = math.nan
            other.grad.copy_(param.grad)
        if step == 3:
            graph = captured(on_device.step)
            on_cpu.param_groups[0]["lr"] = 0.01
            lr.fill_(0.01)
        before = [copies(cpu_params), copies(params)]
        step_both(on_cpu, on_device, graph, overflows=step == 2)
        if step == 2:
            assert on_device.last_step_skipped
            assert all(same_bits(a, b) for a, b in zip(params, before[1], strict=True))
        else:
            assert on_cpu.grad_norm == on_device.grad_norm
        for param, other, *was in zip(cpu_params, params, *before, strict=True):
            assert same_bits(param.grad, other.grad.cpu())
            for name in on_cpu.state[param]:
                if name.startswith("momentum"):
                    assert same_bits(on_cpu.state[param][name], on_device.state[other][name].cpu())
                if name == "second_momentum_buffer":  # of products
                    means, others = on_cpu.state[param][name].double(), on_device.state[other][name].double().cpu()
                    assert (means - others).norm() <= 0.1 * means.norm()
            moves = [(now.cpu().double() - then.cpu().double()) for now, then in zip((param, other), was, strict=True)]
            assert (moves[0] - moves[1]).norm() <= (0.1 if dtype == torch.float32 else 1.0) * moves[0].norm() + 1e-12


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # The error comes before any kernel.
def test_a_first_step_is_not_captured() -> None:
    params = on_gpu(make_params())
    set_grads(params)
    optimizer = optim.AdamW(params)
    with pytest.raises(RuntimeError, match="has no state yet, and every replay of a CUDA graph would create it again"):
        captured(optimizer.step)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("AdamW", {"fused": True}), ("Adagrad", {})])
def test_states_go_to_torch_and_back(name: str, options: dict[str, Any]) -> None:
    params = on_gpu(make_params())
    references = copies(params)
    theirs = getattr(torch.optim, name)(references, **options)
    set_grads(params, references)
    theirs.step()
    ours = getattr(optim, name)(params)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert all(ours.state[param]["step"].device == param.device for param in params)
    with torch.no_grad():
        for param, reference in zip(params, references, strict=True):
            param.copy_(reference)
    set_grads(params, references)
    ours.step()
    theirs.step()
    assert_same(params, references, rtol=3e-6, atol=3e-6)
    assert pickle.loads(pickle.dumps(ours)).state_dict()["state"][0]["step"] == 2
    theirs.load_state_dict(copy.deepcopy(ours.torch_state_dict()))
    set_grads(params, references)
    ours.step()
    theirs.step()
    assert_same(params, references, rtol=3e-6, atol=3e-6)


def test_gradients_on_two_devices_have_no_norm_together() -> None:
    params = [*make_params(), *on_gpu(make_params())]
    set_grads(params)
    optimizer = optim.AdamW(params, max_grad_norm=1.0)
    before = copies(params)
    with pytest.raises(NotImplementedError, match="need all gradients of an optimizer on one device"):
        optimizer.step()
    assert_same(params, before, rtol=0, atol=0)
