"""What a training script does to an optimizer, one operation at a time, on one of several sides to be compared."""

import copy
import io
import os
import pickle
import signal
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optim_cases import TORCHS, TORCHS_SCALER

SECONDS_OF_A_CHILD = 10  # a forked child that takes longer is killed, which fails the comparison
GRADIENTS = ("new", "none", "zero", "view", "strided", "transposed", "expanded", "in place", "data", "times")
GRADIENTS += ("shared", "short", "cast", "inf", "nan")
STATES = ("replace", "in place", "pop", "clear", "new dict", "resize", "retype", "extra", "swap")
WAYS = ("state", "vars", "proxy", "update")  # by which scripts reach states
PARAMETERS = ("data", "in place", "resize", "freeze", "thaw", "transpose", "view")
LOOKS = ("grads", "state", "vars", "state_dict", "groups", "kept", "repr")
HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_pre", "load_post", "none")


class Side:
    """Runs operations with one optimizer class, over parameters of its own.

    Every operation takes plain numbers and words, so that two sides that get the same ones do the same.
    """

    def __init__(self, cls: type, is_torchs: bool, options: dict[str, Any], shapes: list[Any], dtype: torch.dtype):
        import drivetrain

        self.cls, self.is_torchs, self.options = cls, is_torchs, options
        self.params = [nn.Parameter(random(index, shape, dtype)) for index, shape in enumerate(shapes)]
        self.optimizer = cls(self.params, **copy.deepcopy(options))
        scaler_class = TORCHS_SCALER if is_torchs else drivetrain.amp.GradScaler
        self.scaler = scaler_class("cpu", init_scale=8.0, growth_interval=3)
        self.clip = _torchs_clip if is_torchs else drivetrain.optim.clip_grad_norm_
        self.scheduler: Any = None
        self.log: list[str] = []
        self.kept: list[Tensor] = []
        self.earlier: list[Any] = []  # scalers know optimizers by their ids, which must not come again

    def do(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Returns the operation's result, or the exception that it raised."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return getattr(self, operation)(**arguments)
            except Exception as error:
                return error

    def values(self) -> dict[str, Any]:
        """Returns what can be compared without a look at gradients or states."""
        return {"params": [param.detach() for param in self.params], "log": list(self.log)}

    def look(self, how: str) -> Any:
        if how == "grads":
            return [param.grad for param in self.params]
        if how == "state":
            return [dict(self.optimizer.state.get(param, {})) for param in self.params]
        if how == "vars":
            return [dict(vars(self.optimizer)["state"].get(param, {})) for param in self.params]
        if how == "groups":
            return [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups]
        if how == "kept":
            return list(self.kept)
        return repr(self.optimizer) and None if how == "repr" else self.optimizer.state_dict()

    # ---- Gradients.

    def gradients(self, kind: str, seed: int, every: int) -> None:
        for index, param in enumerate(self.params):
            if index % every == 0:
                self._set_gradient(param, kind, random(seed + index, param.shape, param.dtype))

    def _set_gradient(self, param: nn.Parameter, kind: str, value: Tensor) -> None:
        if kind == "none":
            param.grad = None
        elif kind in ("new", "zero"):
            param.grad = value if kind == "new" else torch.zeros_like(value)
        elif kind == "view":
            memory = torch.zeros(value.numel() + 3, dtype=value.dtype)
            memory[3:] = value.flatten()
            self.kept.append(memory)
            param.grad = memory[3:].view(value.shape)
        elif kind == "strided":
            param.grad = torch.stack([value, value], dim=-1)[..., 1]
        elif kind == "transposed":
            param.grad = value.mT.contiguous().mT if value.ndim >= 2 else value
        elif kind == "expanded":
            param.grad = value.flatten()[0].expand(value.shape) if value.numel() else value
        elif kind in ("inf", "nan"):
            param.grad = value.fill_(float(kind)) if param is self.params[0] else value
        elif kind == "cast":
            param.grad = value.half()
        elif kind == "short":
            param.grad = value.flatten()[1:]
        elif param.grad is None:
            param.grad = value
        elif kind == "in place":
            param.grad.copy_(value)
        elif kind == "data":
            self.kept.append(param.grad)
            param.grad.data = value
        elif kind == "times":
            param.grad = param.grad * 2
        else:
            for other in self.params:
                if other.shape == param.shape and other.dtype == param.dtype:
                    other.grad = param.grad

    def backward(self, seed: int) -> Tensor:
        loss = self._loss(seed)
        loss.backward()
        return loss.detach()

    def _loss(self, seed: int) -> Tensor:
        start = torch.zeros((), requires_grad=True)
        factors = [random(seed + place, param.shape, param.dtype) for place, param in enumerate(self.params)]
        return start + sum((param * factor).sum().float() for param, factor in zip(self.params, factors, strict=True))

    def forward(self, seed: int) -> Tensor:
        with torch.no_grad():
            return self._loss(seed)

    def zero_grad(self, to_none: bool, by_hand: bool) -> None:
        if not by_hand:
            self.optimizer.zero_grad(set_to_none=to_none)
            return
        for param in self.params:
            if to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def clip_norm(self, most: float, kind: float) -> Tensor:
        return self.clip(self.params, most, norm_type=kind)

    def clip_value(self, most: float) -> None:
        nn.utils.clip_grad_value_(self.params, most)

    def keep(self, what: str, index: int) -> None:
        param = self.params[index % len(self.params)]
        if what == "grad" and param.grad is not None:
            self.kept.append(param.grad)
        elif what == "part of grad" and param.grad is not None:
            self.kept.append(param.grad.detach().flatten()[1:])
        elif what == "state":
            entries = self.optimizer.state.get(param, {})
            self.kept += [entries[name] for name in sorted(entries) if isinstance(entries[name], Tensor)]
        elif what == "nothing":
            self.kept.clear()

    # ---- Steps.

    def step(self, where: str) -> Any:
        if where == "here":
            return self.optimizer.step()
        is_in_child = where == "child" and self.cls.__name__ != "Muon"  # torch's hangs there
        return self._step_in_a_child() if is_in_child else self._step_in_a_thread()

    def step_with_closure(self, seed: int) -> Any:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self._loss(seed)
            loss.backward()
            return loss

        return self.optimizer.step(closure).detach()

    def _step_in_a_thread(self) -> None:
        raised: list[Exception] = []

        def run() -> None:
            try:
                self.optimizer.step()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(SECONDS_OF_A_CHILD)
        assert not thread.is_alive(), "a step in a thread hangs"
        if raised:
            raise raised[0]

    def _step_in_a_child(self) -> Any:
        """Steps in a forked process, whose parameters come back as the result."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(SECONDS_OF_A_CHILD)
                os.close(read)
                try:
                    self.optimizer.step()
                    outcome: Any = [param.detach() for param in self.params]
                except Exception as error:
                    outcome = type(error)
                with os.fdopen(write, "wb") as file:
                    torch.save(outcome, file)
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            data = file.read()
        _, status = os.waitpid(child, 0)
        if status != 0:
            raise SystemExit(f"{self.cls}: a step in a forked child ends by signal {status}")
        outcome = torch.load(io.BytesIO(data), weights_only=False)
        if isinstance(outcome, type):
            raise outcome("the step in the forked child")
        return outcome

    def scaled_backward(self, seed: int) -> None:
        self.scaler.scale(self._loss(seed)).backward()

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def scaler_step(self) -> Any:
        return self.scaler.step(self.optimizer)

    def scaler_update(self) -> float:
        self.scaler.update()
        return self.scaler.get_scale()

    def scaled_iteration(self, seed: int, clips: bool, zeroes: bool) -> float:
        if zeroes:
            self.optimizer.zero_grad()
        self.scaler.scale(self._loss(seed)).backward()
        if clips:
            self.scaler.unscale_(self.optimizer)
            self.clip(self.params, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()

    # ---- Groups, states and parameters.

    def setting(self, setting: tuple[str, Any], index: int) -> None:
        groups, (key, value) = self.optimizer.param_groups, setting
        group = groups[index % len(groups)]
        if value == "absent":
            group.pop(key, None)
        else:
            group[key] = value

    def tensor_lr(self, value: float, index: int, in_place: bool) -> None:
        groups = self.optimizer.param_groups
        group = groups[index % len(groups)]
        if in_place and isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = torch.tensor(value)

    def add_group(self, seed: int, lr: float) -> None:
        param = nn.Parameter(random(seed, (3, 2), self.params[0].dtype))
        self.params.append(param)
        self.optimizer.add_param_group({"params": [param], "lr": lr})

    def remove_parameter(self, forgets: bool) -> None:
        """Takes the last parameter out of its group, as pruning does."""
        for group in self.optimizer.param_groups:
            if any(param is self.params[-1] for param in group["params"]) and len(self.params) > 1:
                group["params"] = [param for param in group["params"] if param is not self.params[-1]]
                if forgets:
                    self.optimizer.state.pop(self.params[-1], None)
                self.params.pop()
                return

    def states(self, what: str, way: str, index: int, entry: int) -> None:
        state = self._state(way)
        param = self.params[index % len(self.params)]
        if what == "clear":
            state.clear()
        elif what == "new dict":
            self.optimizer.state = defaultdict(dict, state)
        elif what == "pop":
            state.pop(param, None)
        elif state.get(param):
            entries = state[param]
            names = sorted(entries)
            name = names[entry % len(names)]
            if what == "extra":
                entries["script's own"] = torch.ones(2)
            elif what == "swap":
                state[param] = {key: value.clone() for key, value in entries.items() if isinstance(value, Tensor)}
            elif isinstance(entries[name], Tensor):
                value = entries[name]
                if what == "replace":
                    entries[name] = value * 1.0 if name == "step" else value * 0.5
                elif what == "in place":
                    value.mul_(1.0 if name == "step" else 0.5)
                elif what == "retype" and name != "step":
                    entries[name] = value.to(torch.float32 if value.dtype == torch.float64 else torch.float64)
                elif what == "resize" and name != "step":
                    entries[name] = torch.cat([value.flatten(), value.flatten()])

    def _state(self, way: str) -> Any:
        if way == "state":
            return self.optimizer.state
        if way == "vars":
            return vars(self.optimizer)["state"]
        proxy = Proxy.__new__(Proxy)
        if way == "update":
            proxy.__dict__.update(self.optimizer.__dict__)
        else:
            proxy.__dict__["state"] = self.optimizer.state
        return proxy.state

    def parameter(self, what: str, index: int, seed: int) -> None:
        param = self.params[index % len(self.params)]
        value = random(seed, param.shape, param.dtype)
        if what == "data":
            self.kept.append(param.data)
            param.data = value
        elif what == "in place":
            with torch.no_grad():
                param.mul_(0.5)
        elif what == "resize":
            param.grad = None
            param.data = torch.cat([param.data.flatten(), param.data.flatten()])
        elif what == "transpose":
            param.data = param.data.mT.contiguous().mT if param.ndim >= 2 else param.data.clone()
        elif what == "view":
            memory = torch.cat([value.flatten(), param.data.flatten()])
            self.kept.append(memory)
            param.data = memory[value.numel() :].view(value.shape)
        else:
            param.requires_grad_(what == "thaw")

    # ---- Copies, dicts, hooks, schedulers.

    def copied(self, how: str) -> None:
        """Goes on with a copy of the optimizer, and with the copy's parameters."""
        if how == "deepcopy":
            optimizer = copy.deepcopy(self.optimizer)
        else:
            file = io.BytesIO()
            _Pickler(file).dump(self.optimizer) if self.is_torchs else pickle.dump(self.optimizer, file)
            optimizer = _Unpickler(io.BytesIO(file.getvalue())).load()
        self._go_on_with(optimizer)

    def _go_on_with(self, optimizer: Any) -> None:
        self.earlier.append(self.optimizer)
        self.optimizer, self.scheduler = optimizer, None
        by_group = [param for group in optimizer.param_groups for param in group["params"]]
        self.params = by_group
        self.kept.clear()

    def saved(self, through_file: bool) -> Any:
        found = self.optimizer.state_dict()
        if not through_file:
            return copy.deepcopy(found)
        file = io.BytesIO()
        torch.save(found, file)
        file.seek(0)
        return torch.load(file)

    def load(self, saved: Any, into_fresh: bool) -> None:
        if into_fresh:
            groups = [{"params": list(group["params"])} for group in self.optimizer.param_groups]
            self.optimizer = self.cls(groups, **copy.deepcopy(self.options))
            self.scheduler = None
        self.optimizer.load_state_dict(saved)

    def hook(self, kind: str) -> None:
        o, log = self.optimizer, self.log
        register: dict[str, Callable[[Any], Any]] = {
            "step_pre": o.register_step_pre_hook,
            "step_post": o.register_step_post_hook,
            "state_dict_pre": o.register_state_dict_pre_hook,
            "state_dict_post": o.register_state_dict_post_hook,
            "load_pre": o.register_load_state_dict_pre_hook,
            "load_post": o.register_load_state_dict_post_hook,
        }
        if kind in register:
            register[kind](lambda *_: log.append(kind))

    def schedule(self) -> float:
        if self.scheduler is None:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        else:
            self.scheduler.step()
        return float(self.optimizer.param_groups[0]["lr"])


class Proxy(torch.optim.Optimizer):
    """Imitates an optimizer by taking over its attributes, as frameworks' wrappers do."""


_torchs_clip = nn.utils.clip_grad_norm_


def random(seed: int, shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class _Pickler(pickle.Pickler):
    """Pickles torch's own classes while drivetrain's have their names."""

    def persistent_id(self, value: Any) -> str | None:
        return next((name for name, cls in TORCHS.items() if value is cls), None)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: str) -> type:
        return TORCHS[name]
