"""Leaves to torch's own step what no step here can do, for classes that drivetrain.install(optim=True) put in place."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import pieces, precision, sharded
from .arguments import refuse_unsupported
from .state_dicts import StateDicts

# drivetrain.install(optim=True) puts the keys, classes of drivetrain, in the place of the values, torch's classes.
in_place_of: dict[type, type] = {}

# Describes every optimizer that this process has constructed, in order. `python -m drivetrain run` prints it.
constructed: list[str] = []

Refused = list[tuple[Tensor, Exception]]  # parameters that no step here can step, and why

_MOST_REASONS = 10  # that a message names


class LeftToTorch(StateDicts):
    """Decides which parameters torch's class steps, and steps them with it.

    States have the same names under both classes, and stay in `state` in the order that torch's class gives them.
    """

    _is_in_constructor: bool = False
    _refused: Refused = []  # noqa: RUF012  # by groups, until the constructor has all groups; never changed in place

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _asks_for_more(self) -> bool:
        """Returns whether the caller has asked for something that torch's class lacks."""
        groups = self.param_groups if hasattr(self, "param_groups") else []
        is_own = self.max_grad_norm is not None or self.zero_grads_in_step or self.in_backward is not None
        return is_own or any(precision.DEFAULTS.keys() & options.keys() for options in (self._precision, *groups))

    def _torchs_class(self) -> type[torch.optim.Optimizer] | None:
        """Returns the torch class that may take over steps, or None.

        drivetrain.install(optim=True) must have replaced it, and the caller have asked for nothing that it lacks.
        """
        if self._asks_for_more() or (hasattr(self, "param_groups") and pieces.has_any(self._params())):
            return None
        return next((in_place_of[each] for each in type(self).__mro__ if each in in_place_of), None)

    def _refuse_unsupported(self, options: dict[str, Any]) -> None:
        """Raises for options of torch's that no step here has, or leaves all steps to torch's class."""
        try:
            refuse_unsupported(type(self).__name__, options)
        except NotImplementedError as error:
            if self._torchs_class() is None:
                raise
            self._leave_all_to_torch(str(error))

    def _refused_in(self, index: int) -> Refused:
        """Returns the parameters of a group that no step here can step, whatever their gradients are."""
        group = self.param_groups[index]
        reasons = [sharded.why_not(param, group, self._gathers) for param in group["params"]]
        refused: Refused = [
            (param, NotImplementedError(f"{sharded.label_of(group, index, place)} {reason}."))
            for place, (param, reason) in enumerate(zip(group["params"], reasons, strict=True))
            if reason is not None
        ]
        if refused:
            return refused
        try:
            _C.optim_check_hypers(self._asked_by(group, index)[2], index)
        except (NotImplementedError, TypeError, ValueError) as error:
            return [(param, error) for param in group["params"]]
        return []

    def _note_refused(self, refused: Refused) -> None:
        """Leaves parameters of a new group to torch, at once or at the end of the constructor."""
        if self._is_in_constructor:
            self._refused = [*self._refused, *refused]
        elif refused:
            self._leave_to_torch(refused, str(refused[0][1]), stacklevel=4)

    def _leave_what_groups_refused(self) -> None:
        refused, self._refused = self._refused, []
        if refused:
            self._leave_to_torch(refused, str(refused[0][1]), stacklevel=5)

    def _refused_by(self, error: Exception, reader: _C.StepReader) -> Refused:
        """Returns the parameters that the step with this error refused: all that are not left, if it names none."""
        refused: Refused = [(self._whole_of(param), RuntimeError(why)) for param, why in reader.take_refused()]
        if not refused:
            refused = [each for index in range(len(self.param_groups)) for each in self._refused_in(index)]
        left = self._ids_left
        return [each for each in refused if id(each[0]) not in left] or [
            (param, error) for param in self._params() if id(param) not in left
        ]

    def _whole_of(self, param: Tensor) -> Tensor:
        """Returns the DTensor that a plain tensor stands for in the native step, or the tensor itself."""
        return param if self._shards is None else self._shards.whole_of(param)

    def _leave_to_torch(self, refused: Refused, reason: str, stacklevel: int) -> None:
        """Makes torch's class step these parameters from now on, and says so once and in the exit report.

        Args:
            refused: Parameters that no step here can step, and why.
            reason: The reason why it steps all of them, if no other is left.
            stacklevel: Stack level of the warning, from this function.
        """
        if self._steps_as_torch:
            return
        left = self._ids_left | {id(param) for param, _ in refused}
        self._set_left([param for param in self._params() if id(param) in left])
        if self._are_all_left():
            self._stay_torchs(reason)
            return
        reasons = [text.rstrip(".") for text in dict.fromkeys(str(error) for _, error in refused)]
        if len(reasons) > _MOST_REASONS:
            reasons[_MOST_REASONS:] = [f"and {len(reasons) - _MOST_REASONS} more"]
        num_params = len({id(param) for param in self._params()})
        message = (
            f"torch.optim.{self._torchs_base().__name__} steps {len(self._ids_left)} of {num_params} parameters by "
            f"torch's own step: {'; '.join(reasons)}."
        )
        warnings.warn(message, stacklevel=stacklevel)
        constructed.append(message)

    def _set_left(self, left: list[Tensor]) -> None:
        self._left_to_torch = left
        if self._reader is not None:
            self._reader.leave_out(left)

    def _are_all_left(self) -> bool:
        return {id(param) for param in self._params()} <= self._ids_left

    def _leave_all_to_torch(self, reason: str, stacklevel: int = 2) -> None:
        """Makes torch's class take all steps from now on, and says so once and in the exit report."""
        if self._steps_as_torch:
            return
        self._steps_as_torch = True
        self._set_left([])
        message = f"torch.optim.{self._torchs_base().__name__} stays torch's own class: {reason}"
        warnings.warn(message, stacklevel=stacklevel + 1)
        constructed.append(message)

    def _stay_torchs(self, reason: str) -> None:
        """Leaves all steps to the torch class that drivetrain.install(optim=True) replaced by this class.

        While the object is constructed it becomes one of torch's class. Later a scheduler may have wrapped its step().
        """
        original = self._torchs_class()
        assert original is not None
        self._leave_all_to_torch(reason, stacklevel=3)
        if type(self) in in_place_of and self._is_in_constructor:
            self.__class__ = original  # type: ignore[assignment]
            self._step_supports_amp_scaling = bool(self.defaults.get("fused"))
            self._patch_step_function()

    def _step_as_torch(self, params: Sequence[Tensor], overflow_flag: Tensor | None) -> None:
        """Steps these parameters as torch's class does.

        Args:
            params: Some of this optimizer's parameters, or all.
            overflow_flag: Receives whether any gradient of the optimizer is not finite; None if that is known.
        """
        if pieces.has_any(self._params()):
            raise NotImplementedError(
                f"{type(self).__name__} takes torch's steps, and has parameters of a DistributedDataParallel with "
                "shard=: wrap before the first step, or leave shard= out."
            )
        if self._asks_for_more():
            raise NotImplementedError(
                f"{type(self).__name__} takes torch's steps for {len({*map(id, params)})} parameters, which have no "
                "max_grad_norm, zero_grads_in_step or storage formats: set these when you construct it, or leave them "
                "out."
            )
        if overflow_flag is not None:  # A GradScaler has left the search for overflows to this step.
            grads = [param.grad for param in self._params() if param.grad is not None]
            torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow_flag, torch.ones_like(overflow_flag))
            self.found_inf = overflow_flag
        step: Callable[..., object] = self._torchs_base().step
        if getattr(step, "hooked", False):  # The hooks run around this object's own step.
            step = step.__wrapped__  # type: ignore[attr-defined]
        kept, groups = {id(param) for param in params}, self.param_groups
        self.param_groups = [
            {**group, "params": [param for param in group["params"] if id(param) in kept]} for group in groups
        ]
        try:
            step(self)
        finally:
            self.param_groups = groups

    def _step_left(self, reader: _C.StepReader, refusal: Exception | None, overflow_flag: Tensor | None) -> None:
        """Steps the parameters that are left to torch, and from now on those that the native step would refuse.

        Finds all of these first, because torch must step parameters that share memory in their order.

        Args:
            refusal: The error of a native step before, if there was one.
            overflow_flag: As in _step_as_torch().
        """
        before, refused, reason = self._left_to_torch, [], str(refusal)
        try:
            while not self._are_all_left():
                if refusal is None:
                    try:
                        self._check_all(reader)
                        break
                    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                        if self._torchs_class() is None:
                            raise
                        refusal, reason = error, str(error)
                found = self._refused_by(refusal, reader)
                refused += found
                self._set_left([*self._left_to_torch, *(param for param, _ in found)])
                refusal = None
            self._step_as_torch(self._left_to_torch, overflow_flag)
        except BaseException:
            self._set_left(list(before))
            raise
        if refused or self._are_all_left():
            self._leave_to_torch(refused, reason, stacklevel=6)

    def _order_states(self, num_before: int) -> None:
        """Puts states that the step created, all but the first `num_before`, into the order of the parameters."""
        created = {id(param) for param in list(self.state)[num_before:]}
        for param in self._params() if created else []:
            if id(param) in created:
                created.remove(id(param))
                self.state[param] = self.state.pop(param)
