"""Captures the training state of a rank, and restores it: model, optimizers, schedulers, random states and data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parameter import is_lazy

from ...ddp.accumulate import Window
from ...ddp.logical_ranks import parts as logical
from ...optim import precision
from ...optim.sharded import pieces
from ...optim.sharded.dtensors import from_local, is_dtensor, local_part
from ...wrapped import unwrapped
from ..store.reading import Checkpoint
from . import rng, shards
from .encoding import Encoder, decode
from .gradients import Gradients
from .position import Position, Stateful
from .saved_optimizer import ParameterOrder, check_maker, class_name, load_optimizer, parameter_names, plain_name
from .shards import JSON

FORMAT = 1  # of the JSON state


class Snapshot(NamedTuple):
    """Contains what one rank saves: tensors by name, on their devices, and JSON that refers to all ranks' tensors."""

    tensors: dict[str, Tensor]
    state: JSON


class TrainingState:
    """The objects of a training and the ways to capture and restore their states."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        scaler: Any,
        position: Position,
        window: Window | None,
        generators: rng.Generators,
        extra: Mapping[str, Stateful],
        ranks: tuple[int, int],
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
        for index, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"optimizer[{index}] is a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        others = {**{f"scheduler[{index}]": one for index, one in enumerate(schedulers)}, "scaler": scaler}
        for name, one in {**others, **{f"extra[{key!r}]": value for key, value in extra.items()}}.items():
            if one is not None and not isinstance(one, Stateful):
                raise TypeError(f"{name} is a {type(one).__name__}, expected state_dict() and load_state_dict()")
        for index, generator in enumerate(generators):
            rng.state_of(generator, f"generators[{index}]")
        self.wrappers = [module for module in model.modules() if isinstance(module, TorchDistributedDataParallel)]
        self._logical = [found for wrapper in self.wrappers if (found := logical.of(wrapper)) is not None]
        self.model = bare(model)
        self.optimizers = [unwrapped(one, "optimizer", torch.optim.Optimizer) for one in optimizers]
        self.window = window
        self._window_state: Any = None  # restored, for a window that is not there yet
        self._schedulers, self._scaler, self._position = list(schedulers), scaler, position
        self._generators, self._extra = list(generators), dict(extra)
        self._rank, self._world_size = ranks
        self._gradients = [Gradients(optimizer) for optimizer in self.optimizers]
        self._orders: list[ParameterOrder] = []  # of the optimizers' parameters in the state that is restored
        for index, one in enumerate(self.optimizers):
            if shards.is_zero(one) and one._overlap_with_ddp:
                raise NotImplementedError(
                    f"optimizer[{index}] is a ZeroRedundancyOptimizer with overlap_with_ddp=True, which steps in the "
                    "backward pass: expected overlap_with_ddp=False"
                )

    @property
    def keeps_bits(self) -> bool:
        """Returns True if another number of ranks continues with the same bits, given the same samples."""
        return bool(self._logical) and len(self._logical) == len(self.wrappers)

    def open(self, is_noticed: Callable[[], bool] = lambda: False) -> None:
        """Begins to follow the data and the optimizers. `is_noticed` is as `Position.open` takes it."""
        self._refuse_unloadable()
        self._position.open(is_noticed)
        for gradients in self._gradients:
            gradients.open()

    def close(self) -> None:
        self._position.close()
        for gradients in self._gradients:
            gradients.close()

    def capture(self, header: Mapping[str, JSON], with_data: bool = True) -> Snapshot:
        """Returns the state of this moment, with this rank's own tensors and its share of the replicated ones."""
        self._refuse_unsharded_gradients()
        replicated, prefix = self._replicated(), f"rank{self._rank}/" if self._world_size > 1 else ""
        encoder = Encoder(lambda tensor: replicated is not None and _key(tensor) not in replicated, prefix)
        values: dict[str, Any] = {
            "model": self._model_state(),
            "optimizer": [shards.own_state(optimizer) for optimizer in self.optimizers],
            "scheduler": [scheduler.state_dict() for scheduler in self._schedulers],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "gradients": [gradients.state() for gradients in self._gradients],
            "window": None if self.window is None else self.window.state_dict(),
            "forward_sync": [bool(wrapper.require_forward_param_sync) for wrapper in self.wrappers],
            "extra": {name: one.state_dict() for name, one in self._extra.items()},
            "data": self._position.state() if with_data else None,
            "logical_ranks": [one.state_dict() for one in self._logical],
        }
        with ExitStack() as stack:
            for found in self._logical:
                stack.enter_context(found.own_random_states())
            values["rng"] = rng.capture(self._generators)  # last: nothing above may draw from it afterwards
        state = {
            **header,
            "parameters": parameter_names(self.model, self.optimizers),
            "optimizer_classes": [class_name(shards.inner(optimizer)) for optimizer in self.optimizers],
            **{name: encoder.encode(value, name) for name, value in values.items()},
            "meshes": encoder.meshes,
            "split_optimizers": [index for index, one in enumerate(self.optimizers) if shards.is_zero(one)],
        }
        shared = {name: one.nbytes for name, one in encoder.tensors.items() if prefix and not name.startswith(prefix)}
        owners = split(shared, self._world_size)
        own = {name: one for name, one in encoder.tensors.items() if owners.get(name, self._rank) == self._rank}
        return Snapshot(own, state)

    def restore(self, state: JSON, tensors: Mapping[str, Tensor], is_same_world: bool) -> None:
        """Restores what `capture` returned on this rank, or on another one if the number of ranks has changed."""
        if state.get("format") != FORMAT:
            raise ValueError(f"the checkpoint's state has format {state.get('format')!r}, expected {FORMAT}")
        names = ("model", "optimizer", "scheduler", "scaler", "gradients", "window", "extra", "data", "rng")
        values = {name: decode(state[name], tensors) for name in names}
        _check_length("optimizer", self.optimizers, values["optimizer"])
        self._match_parameters(state)
        for index, (optimizer, order) in enumerate(zip(self.optimizers, self._orders, strict=True)):
            check_maker(index, shards.inner(optimizer), values["optimizer"][index], state.get("optimizer_classes"))
            values["optimizer"][index] = order.state(values["optimizer"][index])
            values["gradients"][index] = order.values(values["gradients"][index])
        values["model"] = {plain_name(name): value for name, value in values["model"].items()}
        self._check(values, is_same_world)
        self._place(values)
        ours = {plain_name(name): name for name in self.model.state_dict()}
        try:
            self.model.load_state_dict({ours.get(name, name): value for name, value in values["model"].items()})
        except Exception as error:  # of a module with a loading of its own, which decides about names and shapes
            raise ValueError(f"model does not load its state: {error!r}") from error
        for optimizer, saved in zip(self.optimizers, values["optimizer"], strict=True):
            shards.load_own(optimizer, saved, load_optimizer)
        for scheduler, saved in zip(self._schedulers, values["scheduler"], strict=True):
            scheduler.load_state_dict(saved)
        if self._scaler is not None:
            self._scaler.load_state_dict(values["scaler"])
        for found, counted in zip(self._logical, decode(state.get("logical_ranks", []), tensors), strict=False):
            found.load_state_dict(counted)
        for name, one in self._extra.items():
            one.load_state_dict(values["extra"][name])
        if is_same_world:
            for gradients, saved in zip(self._gradients, values["gradients"], strict=True):
                gradients.restore(saved)
            for wrapper, is_due in zip(self.wrappers, state["forward_sync"], strict=False):
                wrapper.require_forward_param_sync = is_due
            self._window_state = values["window"]
            if self.window is not None:
                self.give_window(self.window)
        self._position.restore(values["data"])
        if is_same_world or state["rank"] == self._rank:
            rng.restore(values["rng"], self._generators)

    def give_window(self, window: Window) -> None:
        """Takes a window for the ones to come, and restores what a checkpoint held about it."""
        self.window = window
        if self._window_state is not None:
            window.load_state_dict(self._window_state)
            self._window_state = None

    def _check(self, values: dict[str, Any], is_same_world: bool) -> None:
        ours, own_loaders = self._model_state(), self._own_loaders()
        self._check_model_names(ours, values["model"])
        for name, saved in values["model"].items():
            here = None if name.startswith(own_loaders) else ours[name]
            if isinstance(here, Tensor) and not is_lazy(here) and _form(here) != _form(saved):
                raise ValueError(f"model has {name!r} as {_form(here)}, expected {_form(saved)} as in the checkpoint")
        _check_length("scheduler", self._schedulers, values["scheduler"])
        if (self._scaler is None) != (values["scaler"] is None):
            expected = "none" if values["scaler"] is None else "one"
            raise ValueError(f"scaler is {self._scaler!r}, expected {expected} as in the checkpoint")
        _check_names("extra", self._extra, values["extra"])
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, values["optimizer"], strict=True)):
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            expected_sizes = [len(group["params"]) for group in saved["param_groups"]]
            if sizes != expected_sizes:
                raise ValueError(
                    f"optimizer[{index}] has groups of {sizes} parameters, expected {expected_sizes} as in the "
                    "checkpoint: before the block, add the groups that the training had added by then"
                )
        for gradients, saved in zip(self._gradients, values["gradients"], strict=True):
            gradients.check(saved)
        self._position.check(values["data"], is_same_world)

    def _replicated(self) -> set[Any] | None:
        """Returns the memory of parameters, and of their states, that are equal on all ranks; None: there is one."""
        if self._world_size == 1:
            return None
        params = [
            param
            for wrapper in self.wrappers
            for name, param in wrapper.module.named_parameters()
            if name not in wrapper.parameters_to_ignore and wrapper.process_group.size() == self._world_size
        ]
        states = [value for one in self.optimizers for p in params for value in one.state.get(p, {}).values()]
        return {_key(value) for value in [*params, *states] if isinstance(value, Tensor)}

    def wanted(self, checkpoint: Checkpoint, state: JSON) -> JSON:
        """Returns a saved state with the states of all parameters that a ZeroRedundancyOptimizer has on this rank."""
        self._match_parameters(state)

        def numbers(index: int) -> set[int] | None:
            optimizer: Any = self.optimizers[index] if index < len(self.optimizers) else None
            if not shards.is_zero(optimizer):
                return None
            own = (param for group in optimizer.optim.param_groups for param in group["params"])
            return {self._orders[index].saved(optimizer._param_to_index[param]) for param in own}

        return shards.merged(checkpoint, state, numbers)

    def region(self, path: str, shape: Sequence[int]) -> shards.Region:
        """Returns the offset and the shape of the part that this rank has of a sharded tensor in a saved state."""
        head, _, rest = path.partition("/")
        if head in ("optimizer", "gradients"):
            parts = rest.split("/")
            at = 2 if head == "optimizer" else 1
            index = int(parts[0])
            if index < len(self._orders):
                parts[at] = str(self._orders[index].ours(int(parts[at])))
            path = "/".join([head, *parts])
        return self._region(path, shape)

    def _region(self, path: str, shape: Sequence[int]) -> shards.Region:
        like = self._like(path)
        if like is None or not is_dtensor(like):
            return shards.whole_region(path, shape)
        return shards.region_of(shape, like.device_mesh, self._placements(like, shape))

    def _model_state(self) -> dict[str, Any]:
        """Returns the module's state dict, whose names are the same with and without torch.compile of submodules."""
        return {plain_name(name): value for name, value in self.model.state_dict().items()}

    def _own_loaders(self) -> tuple[str, ...]:
        """Returns the prefixes of modules whose loading may add, resize and rename what they have."""
        prefixes = (
            plain_name(f"{name}." if name else "")
            for name, module in self.model.named_modules()
            if module._load_state_dict_pre_hooks
            or not type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
        )
        return tuple(prefixes)

    def _check_model_names(self, ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        prefixes = self._own_loaders()
        checked = [
            {name: one for name, one in names.items() if not name.startswith(prefixes)} for names in (ours, saved)
        ]
        _check_names("model", *checked)

    def _match_parameters(self, state: JSON) -> None:
        """Finds where each optimizer's parameters are in a saved state."""
        ours = parameter_names(self.model, self.optimizers)
        saved = state.get("parameters") if isinstance(state, dict) else None
        if saved:  # A model with other names also has other parameters; its error says more.
            self._check_model_names(self._model_state(), {plain_name(name): None for name in state["model"]})
        self._orders = [
            ParameterOrder(f"optimizer[{index}]", names, saved[index] if saved and index < len(saved) else names)
            for index, names in enumerate(ours)
        ]

    def _like(self, path: str) -> Tensor | None:
        """Returns the parameter or buffer to which a tensor of the state belongs; None if there is none."""
        head, _, rest = path.partition("/")
        if head == "model":
            found = self._model_state().get(plain_name(rest))
            return found if isinstance(found, Tensor) else None
        parts = rest.split("/")
        index, number = int(parts[0]), int(parts[2 if head == "optimizer" else 1])
        if index >= len(self.optimizers):
            return None
        params = [param for group in self.optimizers[index].param_groups for param in group["params"]]
        return pieces.part_or_itself(params[number]) if number < len(params) else None

    @staticmethod
    def _placements(like: Any, shape: Sequence[int]) -> Sequence[Any]:
        """Returns the parameter's placements for states of its shape; every rank has all of the others."""
        from torch.distributed.tensor import Replicate

        is_split = tuple(shape) == tuple(like.shape)
        return tuple(like.placements) if is_split else [Replicate()] * like.device_mesh.ndim

    def _place(self, values: dict[str, Any]) -> None:
        """Makes DTensors of the restored parts, and of whole tensors for sharded parameters."""
        values["model"] = {name: self._placed(value, f"model/{name}") for name, value in values["model"].items()}
        for index, saved in enumerate(values["optimizer"]):
            for number, state in saved["state"].items():
                for name, value in state.items():
                    state[name] = self._placed(value, f"optimizer/{index}/state/{number}/{name}")
        values["gradients"] = [
            [self._placed(grad, f"gradients/{index}/{number}") for number, grad in enumerate(grads)]
            for index, grads in enumerate(values["gradients"])
        ]

    def _placed(self, value: Any, path: str) -> Any:
        if not isinstance(value, shards.Shard | Tensor):
            return value
        like = self._like(path)
        if like is None or not is_dtensor(like):
            return value.value if isinstance(value, shards.Shard) else value
        if isinstance(value, Tensor):
            if precision.is_of_blocks(path.rpartition("/")[2]):
                raise ValueError(
                    f"{path} has 8-bit blocks of a whole tensor, and its parameter is a DTensor. Export the checkpoint "
                    "to DCP and import it, or continue without sharding"
                )
            if value.shape != like.shape:
                return value
            offset, local = self._region(path, value.shape)
            cut = tuple(slice(at, at + size) for at, size in zip(offset, local, strict=True))
            value = shards.Shard(value[cut].clone(), tuple(value.shape), path)
        local = value.value.to(local_part(like).device)
        stride = like.stride() if value.shape == tuple(like.shape) else ()
        return from_local(local, like, self._placements(like, value.shape), torch.Size(value.shape), stride)

    def _refuse_unloadable(self) -> None:
        """Raises TypeError if the model saves values that it does not load, such as layers of bitsandbytes."""
        state = self.model.state_dict()
        known = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        added = {name for name in state if name not in known and not name.endswith(_EXTRA_STATE_KEY_SUFFIX)}
        if not added:
            return
        try:
            self.model.load_state_dict(state)  # writes the values that are there
        except RuntimeError as error:
            raise TypeError(
                f"model saves {min(added)!r}, which it does not load, so that no checkpoint could be restored. Pass "
                f"the part that is trained as `model`, such as the adapters. torch: {' '.join(str(error).split())}"
            ) from error

    def _refuse_unsharded_gradients(self) -> None:
        """FSDP keeps gradients that it has not reduced where no parameter shows them."""
        for name, module in self.model.named_modules():
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            # torch 2.11 has one group, and later releases have a list of them.
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for param in (param for group in groups if group is not None for param in group.fsdp_params):
                gathered = getattr(param, "_unsharded_param", None)
                # The gradient is in the dtype of the reduction or of the parameter.
                if param.unsharded_accumulated_grad is not None or getattr(gathered, "grad", None) is not None:
                    raise NotImplementedError(
                        f"model has gradients in {name!r} that FSDP has not reduced: call Checkpointer.step() after "
                        "the optimizer's step only, or accumulate with set_requires_gradient_sync(True)"
                    )


def split(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Returns the rank that saves each name, so that ranks save about as many bytes.

    The largest go first, each to the rank with the fewest bytes so far. Every rank computes the same result.
    """
    loads = [0] * world_size
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners


def state_dicts(checkpoint: Checkpoint, rank: int = 0) -> dict[str, Any] | None:
    """Returns the state dicts that a Checkpointer saved, as one rank has them; None if something else saved them.

    Returns:
        "model" is the module's state dict, "optimizer" and "scheduler" are lists of state dicts, and "scaler" is the
        GradScaler's or None. Tensors are on the CPU.

    Raises:
        CheckpointError: A checksum does not hold, or a file cannot be read.
    """
    state = checkpoint.state(rank)
    if not isinstance(state, dict) or state.get("format") != FORMAT or "model" not in state:
        return None
    state = shards.merged(checkpoint, state, lambda _: None)
    parts = {name: state[name] for name in ("model", "optimizer", "scheduler", "scaler")}
    tensors = checkpoint.load(names_of(list(parts.values())))
    tensors |= shards.read_shards(checkpoint, parts | {"meshes": state.get("meshes")}, shards.whole_region)
    return {name: shards.without_shards(decode(part, tensors)) for name, part in parts.items()}


def names_of(state: JSON) -> list[str]:
    """Returns the names of all tensors that an encoded state refers to, but for parts of sharded ones."""
    return list(dict.fromkeys(shards.marked(state, "$tensor")))


def bare(model: nn.Module) -> nn.Module:
    """Returns the model inside of DistributedDataParallel and torch.compile, whose names need no prefix."""
    while True:
        is_wrapped = isinstance(model, TorchDistributedDataParallel)
        inner = model.module if is_wrapped else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _key(tensor: Tensor) -> Any:
    local = local_part(tensor)
    return local.device, local.untyped_storage().data_ptr()


def _form(value: Any) -> str:
    if isinstance(value, shards.Shard):
        return f"{value.value.dtype} {tuple(value.shape)}"
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_length(what: str, ours: Sequence[Any], saved: Sequence[Any]) -> None:
    if len(ours) != len(saved):
        raise ValueError(f"{what} has {len(ours)} elements, expected {len(saved)} as in the checkpoint")


def _check_names(what: str, ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    if missing := sorted(saved.keys() - ours.keys()):
        raise ValueError(f"{what} has no {missing[0]!r}, which is in the checkpoint ({len(missing)} such names)")
    if extra := sorted(ours.keys() - saved.keys()):
        raise ValueError(f"{what} has {extra[0]!r}, which is not in the checkpoint ({len(extra)} such names)")
