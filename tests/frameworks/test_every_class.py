"""Tests every optimizer class under Accelerate, Lightning Fabric and the Hugging Face Trainer, in one process.

The other side is torch's class of the same name under the same framework, or our class in a plain loop where torch has
none. test_frameworks.py has Lightning's Trainer and several ranks.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import optim
from effort import IS_WHOLE
from optim_cases import OWN_CLASSES

STEPS = 3
MAX_NORM = 0.5
TORCHS_OWN = ["SparseAdam", "LBFGS"]  # re-exported
Train = Callable[[type[torch.optim.Optimizer], nn.Module, bool], None]


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed: pip install 'drivetrain[frameworks]'"
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=reason)


class Model(nn.Module):
    """Embeds tokens and returns their loss. SparseAdam steps its only parameter, with sparse gradients."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4, sparse=is_sparse)
        self.out = nn.Identity() if is_sparse else nn.Linear(4, 4, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": self.out(self.embedding(tokens)).float().square().sum()}


def batches() -> Tensor:
    return torch.randint(8, (STEPS, 4), generator=torch.Generator().manual_seed(1))


def take_step(optimizer: torch.optim.Optimizer, backward: Callable[[], Tensor], clip: Callable[[], object]) -> None:
    """Takes a step as users of LBFGS and of all other classes write it. Sparse gradients cannot be clipped."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = backward()
        if not any(param.is_sparse for group in optimizer.param_groups for param in grads(group)):
            clip()
        return loss

    if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def grads(group: dict[str, Any]) -> list[Tensor]:
    return [param.grad for param in group["params"] if param.grad is not None]


def train_plainly(
    cls: type[torch.optim.Optimizer], model: nn.Module, is_mixed: bool, weight_decay: float | None = None
) -> None:
    options = {} if weight_decay is None else {"weight_decay": weight_decay}
    optimizer = cls(model.parameters(), lr=0.01, **options)
    for tokens in batches():

        def backward(tokens: Tensor = tokens) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                loss = model(tokens)["loss"]
            loss.backward()
            return loss

        take_step(optimizer, backward, lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))


def train_with_accelerate(cls: type[torch.optim.Optimizer], model: nn.Module, is_mixed: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if is_mixed else "no")
    prepared, optimizer = accelerator.prepare(model, cls(model.parameters(), lr=0.01))
    for tokens in batches():

        def backward(tokens: Tensor = tokens) -> Tensor:
            loss = prepared(tokens)["loss"]
            accelerator.backward(loss)
            return loss

        take_step(optimizer, backward, lambda: accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM))


def train_with_fabric(cls: type[torch.optim.Optimizer], model: nn.Module, is_mixed: bool) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if is_mixed else "32-true")
    prepared, optimizer = fabric.setup(model, cls(model.parameters(), lr=0.01))
    for tokens in batches():

        def backward(tokens: Tensor = tokens) -> Tensor:
            loss = prepared(tokens)["loss"]
            fabric.backward(loss)
            return loss

        take_step(optimizer, backward, lambda: fabric.clip_gradients(prepared, optimizer, max_norm=MAX_NORM))


@pytest.fixture
def train_with_huggingface(tmp_path: Path) -> Train:
    def train(cls: type[torch.optim.Optimizer], model: nn.Module, is_mixed: bool) -> None:
        from transformers import Trainer, TrainingArguments

        class InOrder(Trainer):
            def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
                return torch.utils.data.SequentialSampler(self.train_dataset)

        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=is_mixed,
            per_device_train_batch_size=batches().shape[1],
            max_steps=STEPS,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = InOrder(
            model,
            arguments,
            train_dataset=[{"tokens": token} for token in batches().flatten()],
            optimizer_cls_and_kwargs=(cls, {"lr": 0.01}),
        )
        trainer.train()
        assert trainer.state.global_step == STEPS
        assert type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)) is cls

    return train


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    """Forgets Accelerate's process-wide precision before and after, because each test asks for its own."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def check(name: str, train: Train, is_mixed: bool, weight_decay: float | None = None) -> None:
    """Compares a training with our class and its other side. `weight_decay` is what the framework passes."""
    models = [Model(is_sparse=name == "SparseAdam") for _ in range(2)]
    train(getattr(optim, name), models[0], is_mixed)
    if hasattr(torch.optim, name):
        train(getattr(torch.optim, name), models[1], is_mixed)
    else:
        train_plainly(getattr(optim, name), models[1], is_mixed, weight_decay)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)
    start = Model(is_sparse=name == "SparseAdam")
    assert not torch.equal(models[0].embedding.weight, start.embedding.weight)


def each_class(*names: str, first: bool) -> pytest.MarkDecorator:
    """Runs the test for these classes, of which every other one trains in mixed precision; WHOLE=1: all in both."""
    rows = [(name, (index % 2 == 0) == first) for index, name in enumerate(names)]
    rows += [(name, not is_mixed) for name, is_mixed in rows] if IS_WHOLE else []
    return pytest.mark.parametrize(("name", "is_mixed"), rows)


@needs("accelerate")
@pytest.mark.usefixtures("_fresh_accelerate")
@each_class(*OWN_CLASSES, *TORCHS_OWN, first=True)
def test_accelerate(name: str, is_mixed: bool) -> None:
    check(name, train_with_accelerate, is_mixed)


@needs("lightning")
@each_class(*OWN_CLASSES, *TORCHS_OWN, first=False)
def test_fabric(name: str, is_mixed: bool) -> None:
    check(name, train_with_fabric, is_mixed)


# The Trainer passes LBFGS no closure, and asks torch for the norm of SparseAdam's gradients, which it does not compute.
@needs("transformers")
@needs("accelerate")
@pytest.mark.usefixtures("_fresh_accelerate")
@each_class(*OWN_CLASSES, first=True)
def test_huggingface_trainer(name: str, is_mixed: bool, train_with_huggingface: Train) -> None:
    check(name, train_with_huggingface, is_mixed, weight_decay=0.0)  # the default of TrainingArguments
