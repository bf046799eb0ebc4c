"""Pieces: the rows of a parameter that this rank steps under DistributedDataParallel(shard=...), and their use.

The script, its hooks and its schedulers see whole parameters in `param_groups`. Only while an optimizer steps, or saves
or loads its state, do pieces stand in their place. Optimizers of drivetrain.optim get them as DTensors, which know the
other ranks. torch's optimizers get plain tensors, on which their element-wise rules run as on any parameter.
"""

import functools
import inspect
import time
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .. import precision
from ..rule import has_rule
from .dtensors import is_dtensor, local_part, placed_as, portable, rows_of, set_gradient

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from ...ddp.sharding import Sharding


class Piece:
    """This rank's rows of one parameter.

    Args:
        name: The parameter's name, for messages.
        param: The parameter, whose memory the piece shares.
        part: A DTensor of the parameter's shape whose local part becomes the piece. Its placement splits dimension 0,
            or is a replica for parameters without dimensions.
        rows: The first row of this rank and the one behind its last.
        owner: Gathers the parameter after a step.
    """

    def __init__(self, name: str, param: Tensor, part: "DTensor", rows: tuple[int, int], owner: "Sharding") -> None:
        self.name = name
        self.part = part
        self.local = local_part(part)
        self.kept: Tensor | None = None  # reduced gradient that a backward in progress adds to
        self.users: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # their states may be parts
        self._rows = rows
        self._owner = weakref.ref(owner)
        self._address = param.data_ptr()

    @property
    def owner(self) -> "Sharding":
        """Gathers the parameter after a step. Raises RuntimeError if the wrapper is gone."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError(
                f"parameter {self.name!r} belongs to a DistributedDataParallel with shard= that was deleted: keep the "
                "wrapper as long as its optimizer."
            )
        return owner

    def check(self, param: Tensor) -> None:
        """Raises RuntimeError if the parameter no longer lies in the wrapper's memory, or the wrapper is gone."""
        _ = self.owner
        if param.data_ptr() != self._address:
            raise RuntimeError(
                f"parameter {self.name!r} has other memory than DistributedDataParallel(shard=...) gave it: move or "
                "cast the module before wrapping, and change values in place."
            )

    def rows_of(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor of the parameter's shape, as a view."""
        return whole[self._rows[0] : self._rows[1]] if whole.ndim else whole

    @property
    def is_alive(self) -> bool:
        """Returns whether the wrapper is still there."""
        return self._owner() is not None

    def distributed(self, local: Tensor) -> "DTensor":
        """Returns a DTensor of the parameter's shape of which this rank has `local`, which it shares memory with."""
        return type(self.part)(local, self.part._spec, requires_grad=False)

    def gradient(self, param: Tensor) -> Tensor | None:
        """Returns this rank's rows of the parameter's gradient."""
        grad = param.grad
        if grad is None:
            return None
        if is_dtensor(grad):
            return local_part(grad)
        if grad.layout != torch.strided:
            raise NotImplementedError(
                f"parameter {self.name!r} has a sparse gradient, which shard= does not support: construct its layer "
                "with sparse=False."
            )
        rows = self.rows_of(grad.detach())
        return rows if self.kept is None else rows + self.kept

    def local_state(self, name: str, value: Any) -> Any:
        """Returns this rank's part of a state: of a DTensor, or of a tensor of all rows; other values unchanged."""
        if not isinstance(value, Tensor):
            return value
        if is_dtensor(value):
            return local_part(placed_as(self.part, value, f"a state {name!r}"))
        return self.rows_of(value).clone() if self._is_whole(name, value) else value  # a view would keep the whole

    def shared_state(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns a parameter's states, rows as DTensors of all rows. Blocks of all rows become float32."""
        num_elements = self.part.numel()

        def is_of_all_rows(name: str, codes: Tensor) -> bool:
            is_packed = precision.is_packed(codes, values.get(f"{name.removesuffix('_codes')}_scales"))
            return codes.numel() == ((num_elements + 1) // 2 if is_packed else num_elements)

        if self.local.numel() != num_elements and any(
            name.endswith("_codes") and is_of_all_rows(name, value) for name, value in values.items()
        ):
            values = precision.without_blocks(values, torch.empty(self.part.shape, device="meta"))
        return {
            name: self.distributed(self.local_state(name, value)) if self._is_whole(name, value) else value
            for name, value in values.items()
        }

    def _is_whole(self, name: str, value: Any) -> bool:
        """Returns whether a state is a plain tensor with all rows, of which this rank keeps its own."""
        if not isinstance(value, Tensor) or is_dtensor(value) or name in precision.SCALAR_NAMES:
            return False
        is_split = not self.part.placements[0].is_replicate()
        return is_split and value.shape == self.part.shape and not precision.is_of_blocks(name)


_pieces: MutableMapping[Tensor, Piece] = WeakIdKeyDictionary()
_owners: "weakref.WeakSet[Sharding]" = weakref.WeakSet()
_hooks: list[Any] = []  # on the steps of all optimizers, from the first piece on
_SWAPPED = "_drivetrain_swapped"  # the name of an attribute of torch's optimizers while they step


def add(param: Tensor, piece: Piece) -> None:
    """Lets optimizers step this piece in place of the parameter."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_any_step))
    _pieces[param] = piece
    _owners.add(piece.owner)


def piece_of(param: Tensor) -> Piece | None:
    """Returns the parameter's piece, if a wrapper shares it among ranks."""
    piece = _pieces.get(param) if _pieces else None
    return piece if piece is not None and piece.is_alive else None


def _piece_for(optimizer: torch.optim.Optimizer, param: Tensor) -> Piece | None:
    """Returns the parameter's piece. A deleted wrapper's piece counts only if the optimizer has used it."""
    piece = _pieces.get(param) if _pieces else None
    return piece if piece is not None and (piece.is_alive or optimizer in piece.users) else None


def part_or_itself(param: Tensor) -> Tensor:
    """Returns a DTensor with the placements of a sharded parameter's states, or the parameter itself."""
    piece = piece_of(param)
    return param if piece is None else piece.part


def has_any(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a wrapper shares one of the optimizer's parameters among ranks."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return bool(_pieces) and any(_piece_for(optimizer, param) is not None for param in params)


def have_whole_norms(params: list[Tensor]) -> bool:
    """Returns whether steps take the norm of whole gradients in the order of an unsharded step."""
    found = [piece for param in params if (piece := piece_of(param)) is not None]
    return bool(found) and all(piece.owner.has_whole_norms for piece in found)


@contextmanager
def parts_with_gradients(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Puts parts that have the gradients in place of the parameters whose gradients each rank keeps a part of."""
    stand_ins = [part_or_itself(param) if is_dtensor(param.grad) else param for param in params]
    try:
        for param, stand_in in zip(params, stand_ins, strict=True):
            if stand_in is not param:
                set_gradient(stand_in, param.grad)
        yield stand_ins
    finally:
        for param, stand_in in zip(params, stand_ins, strict=True):
            if stand_in is not param:
                stand_in.grad = None


class Swapped:
    """The pieces that stand in an optimizer's groups and state in place of parameters.

    Optimizers of drivetrain.optim get DTensors, others plain tensors. They have gradients if it is for a step. If a
    piece cannot be used, nothing has changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, with_gradients: bool) -> None:
        self._optimizer, self._steps = optimizer, with_gradients
        params = [param for group in optimizer.param_groups for param in group["params"]]
        found = [(param, piece) for param in params if (piece := _piece_for(optimizer, param)) is not None]
        gradients = []
        self._owners: dict[Sharding, list[Tensor]] = {}
        for param, piece in found:
            piece.check(param)
            piece.users.add(optimizer)
            gradients.append(piece.gradient(param) if with_gradients else None)
            self._owners.setdefault(piece.owner, []).append(param)
        rounds = any(group.get("rounding") == "stochastic" for group in optimizer.param_groups)
        if with_gradients and rounds and any(owner.has_whole_norms for owner in self._owners):
            raise NotImplementedError(
                "rounding='stochastic' draws by an element's place in this rank's rows, so that shard= with "
                "logical_ranks cannot keep the bits: leave one of the three out."
            )
        as_parts = has_rule(type(optimizer))
        self._params = [param for param, _ in found]
        self._stand_ins = [piece.part if as_parts else piece.local for _, piece in found]
        for (param, piece), stand_in, grad in zip(found, self._stand_ins, gradients, strict=True):
            set_gradient(stand_in, piece.distributed(grad) if as_parts and grad is not None else grad)
            if param in optimizer.state:
                values = optimizer.state.pop(param)
                local = {} if as_parts else {name: piece.local_state(name, value) for name, value in values.items()}
                optimizer.state[stand_in] = piece.shared_state(values) if as_parts else local
        self._replace(self._params, self._stand_ins)
        for owner in self._owners if with_gradients else ():
            owner.steps.begin(optimizer)

    def back(self) -> None:
        """Puts the parameters back."""
        state = self._optimizer.state
        for param, stand_in in zip(self._params, self._stand_ins, strict=True):
            stand_in.grad = None
            if stand_in in state:
                state[param] = state.pop(stand_in)
        self._replace(self._stand_ins, self._params)
        for owner in self._owners if self._steps else ():
            owner.steps.end()

    def gather(self) -> None:
        """Gets the rows that the other ranks have stepped."""
        for owner, params in self._owners.items():
            owner.gather(params)

    def _replace(self, before: list[Tensor], after: list[Tensor]) -> None:
        by_id = {id(old): new for old, new in zip(before, after, strict=True)}
        for group in self._optimizer.param_groups:
            group["params"] = [by_id.get(id(param), param) for param in group["params"]]


@contextmanager
def in_place(optimizer: torch.optim.Optimizer, with_gradients: bool = False) -> Iterator[Swapped | None]:
    """Puts parts in place of sharded parameters in the groups and the state of an optimizer of drivetrain.optim."""
    if not has_any(optimizer):
        yield None
        return
    swapped = Swapped(optimizer, with_gradients=with_gradients)
    try:
        yield swapped
    finally:
        swapped.back()


def share_states(optimizer: torch.optim.Optimizer) -> None:
    """Makes DTensors of the states that were loaded for parts. Call it under `in_place`."""
    parts = {id(piece.part): piece for piece in _pieces.values()} if _pieces else {}
    for param, values in optimizer.state.items():
        if (piece := parts.get(id(param))) is not None:
            optimizer.state[param] = piece.shared_state(values)


# ---- torch's optimizers.

_NAMES = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_ELEMENT_WISE = {inspect.unwrap(getattr(torch.optim, name).step) for name in _NAMES}


def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Makes torch's optimizers step pieces. Optimizers of drivetrain.optim do so themselves.

    No step begins before all rows are there, as optimizers keep references to parameters.
    """
    for owner in list(_owners):
        owner.gathers.wait()
    if has_rule(type(optimizer)):
        return
    restore(optimizer)
    if not has_any(optimizer):
        return
    kind = type(optimizer).__name__
    if inspect.unwrap(type(optimizer).step) not in _ELEMENT_WISE:
        raise NotImplementedError(
            f"{kind} has parameters of a DistributedDataParallel with shard=, which supports the optimizers of "
            f"drivetrain.optim and torch's element-wise ones: {kind} may need whole parameters. Leave shard= out."
        )
    if any(argument is not None for argument in (*args[1:], *kwargs.values())):
        raise NotImplementedError(
            f"{kind}.step() got a closure, which shard= supports for optimizers of drivetrain.optim only: compute "
            "gradients before step()."
        )
    # The optimizer's own hooks see parameters: ours is the last one before the step, and the first one after it.
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    if _swap not in before.values():
        optimizer.register_step_pre_hook(_swap)
        optimizer.register_step_post_hook(_swap_back)
        optimizer.register_state_dict_pre_hook(restore)
        optimizer.register_state_dict_post_hook(for_files)
    before.move_to_end(next(key for key, hook in before.items() if hook is _swap))
    after.move_to_end(next(key for key, hook in after.items() if hook is _swap_back), last=False)


def _swap(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    setattr(optimizer, _SWAPPED, Swapped(optimizer, with_gradients=True))


def _swap_back(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    swapped: Swapped = getattr(optimizer, _SWAPPED)
    restore(optimizer)
    swapped.gather()


def restore(optimizer: torch.optim.Optimizer) -> None:
    """Puts the parameters back into an optimizer of torch whose step has raised."""
    swapped = optimizer.__dict__.pop(_SWAPPED, None)
    if swapped is not None:
        swapped.back()


def params_by_key(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[Any, Tensor]:
    """Returns the optimizer's parameters by the keys of their states in its state dict."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return dict(zip(keys, params, strict=True))


# ---- Whole states.


def for_files(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict with this rank's rows as DTensors, which other numbers of ranks can load.

    They pickle whole states, for scripts that save on one rank.
    """
    if not has_any(optimizer):
        return state_dict
    states = dict(state_dict["state"])
    for key, param in params_by_key(optimizer, state_dict).items():
        piece = _pieces.get(param)
        if piece is None or key not in states:
            continue
        states[key] = dict(states[key])
        for name, value in states[key].items():
            is_local = isinstance(value, Tensor) and not is_dtensor(value) and value.shape == piece.local.shape
            if is_local and name not in precision.SCALAR_NAMES:
                value = states[key][name] = piece.distributed(value)
            if is_dtensor(value) and piece.is_alive:
                rows = states[key][name] = rows_of(value)
                rows.whole = functools.partial(_whole, weakref.ref(optimizer), weakref.ref(param), name, value)
    return {**state_dict, "state": states}


def _whole(
    of_optimizer: "weakref.ref[torch.optim.Optimizer]", of_param: "weakref.ref[Tensor]", name: str, value: "DTensor"
) -> Tensor:
    """Returns all ranks' rows of a state. Raises RuntimeError if they cannot be had."""
    optimizer, param = of_optimizer(), of_param()
    piece = None if param is None else piece_of(param)
    if optimizer is None or param is None or piece is None:
        raise RuntimeError("the optimizer or the wrapper was deleted")
    local = local_part(value).cpu()
    if value.placements[0].is_replicate():  # also a state that a rule gathers, such as Adafactor's column averages
        return local
    rows = piece.owner.states.ask(optimizer, piece.owner.place_of[id(param)], name)
    whole = torch.cat([local if theirs is None else theirs for theirs in rows])
    if whole.shape != value.shape:
        raise RuntimeError(
            f"the ranks' rows of state {name!r} have shape {tuple(whole.shape)}, expected {tuple(value.shape)}"
        )
    return whole


def rows_of_state(optimizer: torch.optim.Optimizer, param: Tensor, name: str, limit_s: float = 5.0) -> Tensor:
    """Returns this rank's rows of an entry of the optimizer's state dict, for a thread. Leaves the optimizer as it is.

    Raises:
        RuntimeError: There is no such entry, also not after the limit. Meanwhile the script's thread may have put
            parts in the parameter's place, as in_place() does.
    """
    piece = piece_of(param)
    keys = [param] if piece is None else [param, piece.part, piece.local]
    deadline = time.monotonic() + limit_s
    while not (values := next((dict(found) for key in keys if (found := optimizer.state.get(key))), {})):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the parameter has no state {name!r}")
        time.sleep(1e-3)
    if piece is not None and has_rule(type(optimizer)):
        values = portable(piece.part, piece.shared_state(values))
    if not isinstance(values.get(name), Tensor):
        raise RuntimeError(f"the parameter has no state {name!r}")
    value: Tensor = values[name]
    return local_part(value) if is_dtensor(value) else value
