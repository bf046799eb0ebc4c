"""What scripts do with a wrapper: actions that run on both classes, compared after each."""

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from drivetrain import DistributedDataParallel as DDP

Action = tuple[str, dict[str, Any]]


def multiply(module: nn.Module, given: Any, output: Tensor, factor: float) -> Tensor:
    return output * factor


class Net(nn.Module):
    """Has a buffer, a scalar, and a layer that not every forward uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.optional = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, use_optional: bool = True) -> Tensor:
        x = self.norm(self.first(x)).tanh() * self.scale
        return self.last(self.optional(x) if use_optional else x)


class Script:
    """One model with its wrapper and its optimizer, as a script holds them."""

    def __init__(self, wrap: type, options: dict[str, Any]) -> None:
        self.model = wrap(Net(), **options)
        self.views = bool(options.get("gradient_as_bucket_view"))
        self.kept: list[Any] = []  # tensors over `.grad`, and copies of the wrapper
        self.use(self.model)

    def use(self, model: nn.Module) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)

    def loss(self, seed: int, use_optional: bool = True) -> Tensor:
        generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
        loss: Tensor = self.model(torch.randn(5, 3, generator=generator), use_optional).square().sum()
        return loss

    def is_ours(self) -> bool:
        return isinstance(self.model, DDP)

    def values(self) -> list[Tensor | None]:
        """Returns copies of all that the next action may depend on."""
        shown = [*self.params, *self.model.buffers(), *(p.grad for p in self.params)]
        shown += [t for t in self.kept if isinstance(t, Tensor) and not self.views]
        return [None if t is None else t.detach().clone() for t in shown]

    def reduce_rest(self) -> None:
        """Reduces torch's gradients where its class leaves them apart and drivetrain's promises their mean."""
        for param in [] if self.is_ours() else self.params:
            if param.grad is not None:
                with torch.no_grad():
                    mean = param.grad.div(dist.get_world_size())
                    dist.all_reduce(mean)
                    param.grad.copy_(mean)

    def check_complete(self) -> None:
        """Raises RuntimeError, as the next forward would, if a parameter got no gradient. Until then `.grad` differ."""
        self.model._check_reducer_finalized()  # type: ignore[operator]

    # ---- Actions.

    def step(self, seed: int, use_optional: bool, syncs: bool) -> None:
        with nullcontext() if syncs else self.model.no_sync():  # type: ignore[operator]
            self.loss(seed, use_optional).backward()
        self.check_complete()

    def step_in_a_thread(self, seed: int) -> None:
        loss, errors = self.loss(seed), list[BaseException]()

        def run() -> None:
            try:
                loss.backward()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        self.check_complete()

    def forwards_then_backward(self, seed: int) -> None:
        (self.loss(seed) + self.loss(seed + 1)).backward()
        self.check_complete()

    def backward_twice(self, seed: int) -> None:
        loss = self.loss(seed)
        loss.backward(retain_graph=True)
        self.check_complete()
        loss.backward()
        self.reduce_rest()

    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def clip(self, limit: float) -> None:
        nn.utils.clip_grad_norm_(self.params, limit)

    def set_grad(self, index: int, how: str) -> None:
        param = self.params[index % len(self.params)]
        if how == "none" or param.grad is None:
            param.grad = None
        elif how == "new":
            param.grad = param.grad * 3
        elif how == "held":
            self.kept.append(param.grad * 2)
            param.grad = self.kept[-1]
        elif how == "data" and not self.views:  # torch's class loses these values if its `.grad` are views of buckets
            param.grad.data = param.grad.data * 3
        elif how == "half":
            param.grad = param.grad.half().float()
        elif how == "in place":
            param.grad.mul_(0.5)
        elif how == "through data":
            param.grad.data.add_(1)

    def keep(self, index: int, how: str) -> None:
        grad = self.params[index % len(self.params)].grad
        if grad is not None:
            views: dict[str, Callable[[Tensor], Tensor]] = {
                "itself": lambda g: g,
                "flat": lambda g: g.flatten(),
                "detached": lambda g: g.detach(),
                "data": lambda g: g.data,
            }
            self.kept.append(views[how](grad))

    def evaluate(self, seed: int, records: bool) -> None:
        self.model.eval()
        with nullcontext() if records else torch.no_grad():
            self.loss(seed)
        self.model.train()

    def copy_on(self, rank: int, how: str) -> None:
        """Copies, saves or loads the wrapper on one rank, and uses the copy without training."""
        if dist.get_rank() == rank:
            copied = self.copied(how)
            self.kept.append(copied)
            with torch.no_grad():
                copied.module.eval()(torch.ones(2, 3))
            self.model.load_state_dict(self.model.state_dict() | copied.state_dict())

    def copied(self, how: str) -> Any:
        if how == "deepcopy":
            return copy.deepcopy(self.model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(self.model))
        if how == "average":
            return torch.optim.swa_utils.AveragedModel(self.model).module
        stream = io.BytesIO()
        torch.save(self.model, stream)
        stream.seek(0)
        return torch.load(stream, weights_only=False)

    def train_the_copy(self, how: str) -> None:
        self.kept.append(self.model)
        self.use(self.copied(how))

    def load(self, factor: float) -> None:
        self.model.load_state_dict({k: (v * factor).to(v.dtype) for k, v in self.model.state_dict().items()})

    def tensor_hook(self, index: int, factor: float) -> None:
        param = self.params[index % len(self.params)]
        if param.requires_grad:
            param.register_hook(lambda grad: grad * factor)

    def module_hook(self, factor: float) -> None:
        hook = functools.partial(multiply, factor=factor)  # which can be copied
        self.model.module.last.register_forward_hook(hook)  # type: ignore[union-attr, operator]

    def comm_hook(self, compresses: bool) -> None:
        hook = default_hooks.bf16_compress_hook if compresses else default_hooks.allreduce_hook
        self.model.register_comm_hook(None, hook)  # type: ignore[operator]

    def freeze(self, index: int, requires_grad: bool) -> None:
        self.params[index % len(self.params)].requires_grad_(requires_grad)

    def set_buffer(self, value: float) -> None:
        self.model.module.norm.running_mean.fill_(value + dist.get_rank())  # type: ignore[union-attr, operator]

    def join(self, seed: int, more: int, divides: bool) -> None:
        with self.model.join(divide_by_initial_world_size=divides):  # type: ignore[operator]
            for number in range(1 + more * dist.get_rank()):
                self.optimizer.zero_grad()
                self.loss(seed + number).backward()


def play(options: dict[str, Any], actions: list[Action]) -> str | None:
    """Runs the actions on both classes. Returns the first difference, None if there is none."""
    torch.manual_seed(0)
    scripts = [Script(wrap, options) for wrap in (TorchDDP, DDP)]
    left_out = set()
    if options.get("static_graph"):
        left_out.add("train_the_copy")  # torch's copy may reduce nothing
        if options["find_unused_parameters"]:
            left_out.add("join")  # ends the process under torch
    if any(name == "freeze" for name, _ in actions):
        left_out.add("join")  # a rank that has joined waits until the timeout for gradients that do not come
    for number, (name, arguments) in enumerate(actions):
        if name in left_out:
            continue
        errors: list[Exception | None] = []
        for script in scripts:
            try:
                getattr(script, name)(**arguments)
                errors.append(None)
            except Exception as error:
                errors.append(error)
        if "report a bug" in str(errors[0]):
            return None  # a defect of torch
        where = f"after action {number}, {name}({arguments}) on rank {dist.get_rank()}"
        if type(errors[0]) is not type(errors[1]):
            return f"{where}: torch {errors[0]!r}; drivetrain {errors[1]!r}"
        if errors[0] is not None:
            return None
        for index, (theirs, ours) in enumerate(zip(*(script.values() for script in scripts), strict=True)):
            if (theirs is None) != (ours is None) or (
                theirs is not None and ours is not None and not torch.equal(theirs.nan_to_num(), ours.nan_to_num())
            ):
                return f"{where}: value {index} is {ours}, with torch {theirs}"
    return None
