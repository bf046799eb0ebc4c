"""Leaves to torch's own step what no step here can do, for classes that drivetrain.install(optim=True) put in place."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import arguments
from .kept import NAME, in_place_of
from .rule import overridden, steps_itself, torchs_base, unhooked
from .sharded import dtensors, pieces
from .state_dicts import StateDicts

# Describes every optimizer that this process has constructed, in order. `python -m drivetrain run` prints it.
constructed: list[str] = []

Refused = list[tuple[Tensor, Exception]]  # parameters that no step here can step, and why

_MOST_REASONS = 10  # that a message names


class LeftToTorch(StateDicts):
    """Decides which parameters torch's class steps, and steps them with it.

    States have the same names under both classes, and stay in `state` in the order that torch's class gives them.
    """

    def _asks_for_more(self) -> bool:
        """Returns whether the caller has asked for something that torch's class lacks."""
        groups = getattr(self.optimizer, "param_groups", [])
        is_own = (
            self.kept.max_grad_norm is not None or self.kept.zero_grads_in_step or self.kept.in_backward is not None
        )
        is_own = is_own or self.kept.fallback is not None or bool(self.kept.formats)
        return is_own or any(self.formats_of(group) for group in groups)

    def torchs_class(self) -> type[torch.optim.Optimizer] | None:
        """Returns the torch class that may take over steps, or None.

        drivetrain.install(optim=True) must have replaced it, and the caller have asked for nothing that it lacks.
        """
        if self._asks_for_more() or (hasattr(self.optimizer, "param_groups") and pieces.has_any(self.params())):
            return None
        return next((in_place_of[each] for each in type(self.optimizer).__mro__ if each in in_place_of), None)

    @property
    def torchs_name(self) -> str:
        """The name of the torch class that the optimizer derives from."""
        return torchs_base(type(self.optimizer)).__name__

    def leave_what_is_overridden(self) -> None:
        """Leaves all steps to torch's class if a script has replaced methods that only torch's step calls.

        Raises:
            NotImplementedError: The optimizer has options that torch's step lacks.
        """
        if self.kept.steps_as_torch or not (names := overridden(self.optimizer)):
            return
        reason = f"{self.class_name} replaces {', '.join(names)}, which torch's step calls"
        if self._asks_for_more():
            raise NotImplementedError(
                f"{reason}, and this optimizer has options that only drivetrain's step has: leave one of the two out."
            )
        self._leave_all_to_torch(f"{reason}.")

    def refuse_unsupported(self, options: dict[str, Any]) -> None:
        """Raises for options of torch's that no step here has, or leaves all steps to torch's class."""
        try:
            arguments.refuse_unsupported(self.class_name, options)
        except NotImplementedError as error:
            if self.torchs_class() is None:
                raise
            self._leave_all_to_torch(str(error))

    def refused_in(self, index: int) -> Refused:
        """Returns the parameters of a group that no step here can step, whatever their gradients are."""
        if steps_itself(type(self.optimizer)):
            return []  # It may need other numbers, or never call this class's step.
        group = self.param_groups[index]
        params: list[Tensor] = list(group["params"])
        reasons = [dtensors.why_not(param, group, self.rule.gathers) for param in params]
        refused: Refused = [
            (param, NotImplementedError(f"{dtensors.label_of(group, index, place)} {reason}."))
            for place, (param, reason) in enumerate(zip(params, reasons, strict=True))
            if reason is not None
        ]
        if refused:
            return refused
        try:
            _, formats, numbers = self.asked_by(group, index)
            _C.optim_check_hypers(numbers, index)
        except (NotImplementedError, TypeError, ValueError) as error:
            return [(param, error) for param in params]
        misfits = {dtype: _C.optim_why_not(formats, dtype) for dtype in {param.dtype for param in params}}
        return [
            (param, ValueError(f"{dtensors.label_of(group, index, place)}: {misfits[param.dtype]}."))
            for place, param in enumerate(params)
            if misfits[param.dtype] and param.requires_grad
        ]

    def note_refused(self, refused: Refused) -> None:
        """Leaves parameters of a new group to torch, at once or at the end of the constructor."""
        if self.kept.is_in_constructor:
            self.kept.refused = [*self.kept.refused, *refused]
        elif refused:
            self._leave_to_torch(refused, str(refused[0][1]), stacklevel=4)

    def leave_what_groups_refused(self) -> None:
        refused, self.kept.refused = self.kept.refused, []
        if refused:
            self._leave_to_torch(refused, str(refused[0][1]), stacklevel=5)

    def _refused_by(self, error: Exception, reader: _C.StepReader) -> Refused:
        """Returns the parameters that the step with this error refused: all that are not left, if it names none."""
        refused: Refused = [(self._whole_of(param), RuntimeError(why)) for param, why in reader.take_refused()]
        if not refused:
            refused = [each for index in range(len(self.param_groups)) for each in self.refused_in(index)]
        left = self.kept.ids_left
        return [each for each in refused if id(each[0]) not in left] or [
            (param, error) for param in self.params() if id(param) not in left
        ]

    def _whole_of(self, param: Tensor) -> Tensor:
        """Returns the DTensor that a plain tensor stands for in the native step, or the tensor itself."""
        return param if self.kept.shards is None else self.kept.shards.whole_of(param)

    def _leave_to_torch(self, refused: Refused, reason: str, stacklevel: int) -> None:
        """Makes torch's class step these parameters from now on, and says so once and in the exit report.

        Args:
            refused: Parameters that no step here can step, and why.
            reason: The reason why it steps all of them, if no other is left.
            stacklevel: Stack level of the warning, from this function.
        """
        if self.kept.steps_as_torch:
            return
        left = self.kept.ids_left | {id(param) for param, _ in refused}
        self._set_left([param for param in self.params() if id(param) in left])
        if self._are_all_left():
            self._stay_torchs(reason)
            return
        reasons = [text.rstrip(".") for text in dict.fromkeys(str(error) for _, error in refused)]
        if len(reasons) > _MOST_REASONS:
            reasons[_MOST_REASONS:] = [f"and {len(reasons) - _MOST_REASONS} more"]
        num_params = len({id(param) for param in self.params()})
        message = (
            f"torch.optim.{self.torchs_name} steps {len(self.kept.ids_left)} of {num_params} parameters by "
            f"torch's own step: {'; '.join(reasons)}."
        )
        warnings.warn(message, stacklevel=stacklevel)
        constructed.append(message)

    def _set_left(self, left: list[Tensor]) -> None:
        self.kept.left = left
        if self.kept.reader is not None:
            self.kept.reader.leave_out(left)

    def _are_all_left(self) -> bool:
        return {id(param) for param in self.params()} <= self.kept.ids_left

    def _leave_all_to_torch(self, reason: str, stacklevel: int = 2) -> None:
        """Makes torch's class take all steps from now on, and says so once and in the exit report."""
        if self.kept.steps_as_torch:
            return
        self.kept.steps_as_torch = True
        self._set_left([])
        message = f"torch.optim.{self.torchs_name} stays torch's own class: {reason}"
        warnings.warn(message, stacklevel=stacklevel + 1)
        constructed.append(message)

    def _stay_torchs(self, reason: str) -> None:
        """Leaves all steps to the torch class that drivetrain.install(optim=True) replaced by this class.

        While the object is constructed it becomes one of torch's class. Later a scheduler may have wrapped its step().
        """
        original = self.torchs_class()
        assert original is not None
        self._leave_all_to_torch(reason, stacklevel=3)
        if type(self.optimizer) in in_place_of and self.kept.is_in_constructor:
            self.optimizer.__class__ = original
            del self.optimizer.__dict__[NAME]
            self.optimizer._patch_step_function()

    def step_as_torch(self, params: Sequence[Tensor], overflow_flag: Tensor | None) -> None:
        """Steps these parameters as torch's class does.

        Args:
            params: Some of this optimizer's parameters, or all.
            overflow_flag: Receives whether any gradient of the optimizer is not finite; None if that is known.
        """
        if pieces.has_any(self.params()):
            raise NotImplementedError(
                f"{self.class_name} takes torch's steps, and has parameters of a DistributedDataParallel with "
                "shard=: wrap before the first step, or leave shard= out."
            )
        if self._asks_for_more():
            raise NotImplementedError(
                f"{self.class_name} takes torch's steps for {len({*map(id, params)})} parameters, which have no "
                "max_grad_norm, zero_grads_in_step or storage formats: set these when you construct it, or leave them "
                "out."
            )
        if overflow_flag is not None:  # A GradScaler has left the search for overflows to this step.
            grads = [param.grad for param in self.params() if param.grad is not None]
            torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow_flag, torch.ones_like(overflow_flag))
            self.optimizer.found_inf = overflow_flag
        step = unhooked(torchs_base(type(self.optimizer)).step)  # The hooks run around this object's own step.
        kept, groups = {id(param) for param in params}, self.param_groups
        self.optimizer.param_groups = [
            {**group, "params": [param for param in group["params"] if id(param) in kept]} for group in groups
        ]
        try:
            step(self.optimizer)
        finally:
            self.optimizer.param_groups = groups

    def step_left(self, reader: _C.StepReader, refusal: Exception | None, overflow_flag: Tensor | None) -> None:
        """Steps the parameters that are left to torch, and from now on those that the native step would refuse.

        Finds all of these first, because torch must step parameters that share memory in their order.

        Args:
            refusal: The error of a native step before, if there was one.
            overflow_flag: As in step_as_torch().
        """
        before, refused, reason = self.kept.left, [], str(refusal)
        try:
            while not self._are_all_left():
                if refusal is None:
                    try:
                        self.check_all(reader)
                        break
                    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                        if self.torchs_class() is None:
                            raise
                        refusal, reason = error, str(error)
                found = self._refused_by(refusal, reader)
                refused += found
                self._set_left([*self.kept.left, *(param for param, _ in found)])
                refusal = None
            self.step_as_torch(self.kept.left, overflow_flag)
        except BaseException:
            self._set_left(list(before))
            raise
        if refused or self._are_all_left():
            self._leave_to_torch(refused, reason, stacklevel=6)

    def order_states(self, num_before: int) -> None:
        """Puts states that the step created, all but the first `num_before`, into the order of the parameters."""
        created = {id(param) for param in list(self.optimizer.state)[num_before:]}
        for param in self.params() if created else []:
            if id(param) in created:
                created.remove(id(param))
                self.optimizer.state[param] = self.optimizer.state.pop(param)
