"""Tests planned memory against the allocator's own events of real steps."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

import drivetrain
from drivetrain.planner.tracer import PlanError, trace_steps
from suite.activation_models import GPT, UNet
from suite.plan_models import Case, measured_peak


def made(model: nn.Module, loss: Callable[[], torch.Tensor], batch: tuple[torch.Tensor, ...], **how: object) -> Case:
    kind = how.get("optimizer", torch.optim.AdamW)
    optimizer = kind(model.parameters(), lr=1e-3, **how.get("arguments", {}))  # type: ignore[operator, call-overload]
    return Case("", model, batch, loss, optimizer, bool(how.get("autocast")))


def gpt(**how: object) -> Case:
    torch.manual_seed(0)
    model = GPT(depth=3, dim=64, heads=4, length=32, dropout=float(how.pop("dropout", 0.1)), vocabulary=256)  # type: ignore[arg-type]
    model = model.to(how.pop("dtype", torch.float32))  # type: ignore[call-overload]
    tokens, targets = torch.randint(256, (2, 4, 32))
    return made(model, lambda: model(tokens, targets), (tokens, targets), **how)


def unet() -> Case:
    torch.manual_seed(0)
    model = UNet(channels=16)
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(8, (2, 64, 64))
    return made(model, lambda: model(images, labels), (images, labels))


def tied() -> Case:
    torch.manual_seed(0)
    model = GPT(depth=1, dim=64, heads=4, length=32, vocabulary=256)
    model.head.weight = model.tokens.weight
    tokens, targets = torch.randint(256, (2, 4, 32))
    return made(model, lambda: model(tokens, targets), (tokens, targets))


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(intermediate_size=128, vocab_size=256, **sizes)).train()
    tokens = torch.randint(256, (2, 32))
    return made(model, lambda: model(input_ids=tokens, labels=tokens).loss, (tokens,))


def checkpointed() -> Case:
    case = gpt()
    for block in case.model.blocks:  # type: ignore[union-attr]
        plain = block.forward
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, plain, use_reentrant=False)  # type: ignore[union-attr, assignment]
    return case


CASES: dict[str, Callable[[], Case]] = {
    "gpt": gpt,
    "gpt without dropout": lambda: gpt(dropout=0.0),
    "gpt in bfloat16": lambda: gpt(dtype=torch.bfloat16),
    "gpt with autocast": lambda: gpt(autocast=True),
    "gpt with SGD": lambda: gpt(optimizer=torch.optim.SGD, arguments={"momentum": 0.9}),
    "gpt with foreach": lambda: gpt(arguments={"foreach": True}),
    "gpt with checkpoints": checkpointed,
    "unet": unet,
    "tied weights": tied,
    "llama": llama,
}


@pytest.mark.parametrize("name", CASES)
def test_peak_is_the_allocators(name: str) -> None:
    if name == "llama" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    case = CASES[name]()
    planned = drivetrain.plan(case.model, case.step, device="cpu").memory.peak_allocated
    measured = measured_peak(case)
    assert -0.03 <= planned / measured - 1 <= 0.04


def test_planning_changes_nothing() -> None:
    case = gpt()
    case.step()
    case.loss().backward()
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    grads = [parameter.grad for parameter in case.model.parameters()]
    states = {key: {n: v.clone() for n, v in s.items()} for key, s in case.optimizer.state.items()}
    random_state = torch.get_rng_state()
    drivetrain.plan(case.model, case.step, device="h100")
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(parameter.grad is grad for parameter, grad in zip(case.model.parameters(), grads, strict=True))
    assert case.optimizer.state.keys() == states.keys()
    for key, state in states.items():
        for name, value in state.items():
            assert torch.equal(case.optimizer.state[key][name], value)
    assert torch.equal(torch.get_rng_state(), random_state)
    case.step()


def test_model_on_meta_has_the_peak_of_a_real_one() -> None:
    case = gpt(optimizer=torch.optim.SGD)
    with torch.device("meta"):
        model = GPT(depth=3, dim=64, heads=4, length=32, vocabulary=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens, targets = case.batch

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    planned = drivetrain.plan(model, step, device="h100")
    expected = drivetrain.plan(case.model, case.step, device="h100")
    assert planned.memory.peak_allocated == expected.memory.peak_allocated
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("formats", [{}, {"state_bits": 8, "min_8bit_size": 0}, {"state_bits": 16}])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Adafactor"])
def test_states_of_our_optimizers_are_those_of_a_step(name: str, formats: dict[str, int]) -> None:
    case = gpt(optimizer=getattr(drivetrain.optim, name), arguments=formats, dtype=torch.bfloat16)
    planned = drivetrain.plan(case.model, case.step, device="cpu")
    assert planned.trace.optimizers == [name]
    assert not case.optimizer.state
    case.step()
    real = [v for state in case.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    expected = sum(value.untyped_storage().nbytes() for value in real if value.dim() or value.numel() > 1)
    assert planned.trace.bytes_of("optimizer states") == expected


def test_value_dependent_step_is_refused() -> None:
    model = nn.Linear(4, 4)

    def selects() -> None:
        out = model(torch.ones(2, 4))
        out[out > 0].sum().backward()

    with pytest.raises(PlanError, match="depends on values"):
        drivetrain.plan(model, selects, device="cpu")
    with pytest.raises(PlanError, match="ran no backward"):
        drivetrain.plan(model, lambda: model(torch.ones(2, 4)), device="cpu")
    with pytest.raises(PlanError, match="reads the values"):
        drivetrain.plan(model, lambda: model(torch.ones(2, 4)).detach().numpy(), device="cpu")


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    with pytest.raises(PlanError, match=r"makes a sparse tensor .*: plan with sparse=False"):
        drivetrain.plan(model, lambda: model(torch.zeros(2, dtype=torch.long)).sum().backward())


def test_recurrent_layers_of_gpus_are_noted() -> None:
    model = nn.LSTM(8, 8)
    plan = drivetrain.plan(model, lambda: model(torch.ones(3, 2, 8))[0].sum().backward(), device="h100")
    assert any("recurrent" in note for note in plan.trace.notes)
    assert "recurrent" in str(plan)


def test_trace_names_modules_of_forward_and_backward() -> None:
    case = gpt()
    trace = trace_steps(case.model, case.step)
    products = [op for op in trace.last_step() if op.name in ("aten::mm", "aten::addmm")]
    by_phase = {phase: {op.module for op in products if op.phase == phase} for phase in ("forward", "backward")}
    assert "blocks.1.up" in by_phase["forward"]
    assert by_phase["forward"] == by_phase["backward"]
