"""Runs the native step over parameter groups, and creates and converts the states that it needs."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from . import precision, sparse
from .grad_scaling import GradScaling
from .kept import stands_for_torchs
from .sharded import dtensors, over_groups
from .sharded.mesh_sums import MeshSums
from .sharded.step import Measured, Shards


class Replaced(NamedTuple):
    """A state entry that a step wrote or removed; the name "" stands for the parameter itself."""

    param: Tensor
    name: str
    before: Any


class NativeStep(GradScaling):
    """Connects parameter groups and the native step, which follows the class's rule."""

    def formats_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the group's options of precision.DEFAULTS.

        In an object that stands for torch's class, such keys are options if the constructor got options, or if the
        group's state dict had them. Otherwise they are the script's own.
        """
        found = {name: group[name] for name in precision.DEFAULTS if name in group}
        if not found or self.kept.formats or precision.VERSION_NAME in group:
            return found
        return {} if stands_for_torchs(type(self.optimizer)) else found

    def precision_of(self, group: dict[str, Any]) -> _C.Precision:
        """Converts the group's options for the native step."""
        return precision.of(self.formats_of(group))

    def complete_states(
        self,
        params: Sequence[tuple[Tensor, dict[str, Any], str]],
        rule: str,
        states: dict[Tensor, Any],
        written: list[Replaced],
    ) -> list[Tensor]:
        """Creates missing states under torch's names, and converts states to the storage format that their group asks
        for.

        Runs in one pass per device without waiting for it.

        Args:
            params: Parameters, each with its group and label.
            rule: The native rule of all of them.
            states: The optimizer's states by parameter.
            written: Receives the entries that were written or removed, so that _take_back() can restore them.

        Returns:
            The parameters that had no state of the rule: this is their first step.
        """
        fresh = []
        conversions = _C.Conversions()
        precisions = {id(group): self.precision_of(group) for _, group, _ in params}

        def write(param: Tensor, entries: dict[str, Tensor | None]) -> None:
            state = states[param]
            for name, value in entries.items():
                if value is None and name not in state:
                    continue
                written.append(Replaced(param, name, state.get(name)))
                if value is None:
                    del state[name]
                else:
                    state[name] = value

        def round_again(param: Tensor, group: dict[str, Any], label: str) -> None:
            state = states[param]
            # The parameter's own bits may change only where it had a remainder, a compensation or a master.
            had_extra = any(name in state for name in precision.EXTRA_NAMES)
            before = param.detach().clone() if had_extra else None
            entries = precision.extra_as_asked(state, param, precisions[id(group)], label, conversions)
            if entries and before is not None:
                written.append(Replaced(param, "", before))
            write(param, entries)

        # float32, as torch keeps it by default (float64 where that is the default dtype).
        step_dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        # Creates states name by name, so that later steps find the tensors of each name side by side in memory.
        for param, group, _ in params:
            if states[param].get("step") is None and _C.optim_counts_steps(rule, precisions[id(group)]):
                write(param, {"step": conversions.new_counter(counter_device(param), step_dtype)})
            for name in _C.optim_scalars(rule):
                if states[param].get(name) is None:
                    initial = self.rule.initial(group, name)
                    dtype = self.rule.scalar_dtype or step_dtype
                    write(param, {name: conversions.new_counter(counter_device(param), dtype, initial)})
        for name, kind in _C.optim_states(rule):
            for param, group, label in params:
                state = states[param]
                fill = None if name == self.rule.copies else self.rule.initial(group, name)
                entries = precision.state_as_asked(
                    state, name, kind, param, precisions[id(group)], label, fill, conversions
                )
                if entries and not precision.has_state(state, name):
                    fresh.append(param)
                write(param, entries)
        for param, group, label in params:
            round_again(param, group, label)
        conversions.run()
        return fresh

    def step_all(self, reader: _C.StepReader, options: _C.StepOptions) -> _C.StepResult | Measured:
        """Steps dense gradients natively, and sparse ones with torch's function where torch's class accepts them."""
        if not self.kept.may_be_sparse:
            try:
                return self.step_groups(self.param_groups, reader, options)
            except RuntimeError:
                # Nothing has changed. Checking every step for sparse gradients would take time for each parameter.
                if self.rule.step_sparse is None or not sparse.has_any(self.param_groups):
                    raise
                self.kept.may_be_sparse = True
        assert self.rule.step_sparse is not None
        dense_groups, sparse_groups = sparse.split(self.param_groups, dtensors.label_of)
        is_any_sparse = any(group["params"] for group in sparse_groups)
        scaled = any(getattr(self.optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        if is_any_sparse and (options.max_grad_norm is not None or options.check_finite or scaled):
            raise NotImplementedError(
                f"drivetrain.optim.{self.class_name}: a gradient is sparse, which neither max_grad_norm nor an "
                "unscaling step supports: leave max_grad_norm and fused=True out, and use torch.amp.GradScaler."
            )
        result = self.step_groups(dense_groups, reader, options)
        with torch.no_grad():
            for group in sparse_groups:
                if group["params"]:
                    self.rule.step_sparse(self.optimizer, group, group["params"])
                for param in group["params"] if self.kept.zero_grads_in_step else []:
                    param.grad.zero_()
        return result

    def check_all(self, reader: _C.StepReader) -> None:
        """Raises what a step would raise, and changes nothing: as a step after an overflow."""
        groups = self.param_groups
        if self.rule.step_sparse is not None and sparse.has_any(groups):
            groups, _ = sparse.split(groups, dtensors.label_of)
        self.step_groups(groups, reader, _C.StepOptions(found_inf=1.0))

    @torch.no_grad()
    def step_groups(
        self, groups: list[dict[str, Any]], reader: _C.StepReader, options: _C.StepOptions
    ) -> _C.StepResult | Measured:
        """Steps `groups`: this optimizer's groups, or copies of them with some of their parameters.

        Args:
        groups: Parameter groups.
        reader: Keeps what it read, so use one reader for the same parameters each time.
        options: Unscaling, clipping and zeroing.
        """
        if not all(isinstance(group["params"], list) for group in groups):  # but a tuple, a ParameterList, ...
            groups = [{**group, "params": list(group["params"])} for group in groups]

        def run(
            plain_groups: list[dict[str, Any]], state: dict[Tensor, Any], step_options: _C.StepOptions
        ) -> tuple[_C.StepResult, bool]:
            return self._step_plain(plain_groups, state, reader, step_options)

        needs_norm = options.max_grad_norm is not None or options.check_finite
        if (
            self.kept.shards is None
            and needs_norm
            and over_groups.has_any(p for group in groups for p in group["params"])
        ):
            self.kept.shards = Shards()  # the norm is one over ranks, as of DTensors
        if self.kept.shards is None:
            result, _ = self._step_plain(groups, self.optimizer.state, reader, options)
            if not result.has_wrappers:
                return result
            self.kept.shards = Shards()
        sums = functools.partial(MeshSums, hypers=self.rule.hypers)
        return self.kept.shards.step(
            groups, self.optimizer.state, self.kept.ids_left, options, self.rule.gathers, sums, run
        )

    def _step_plain(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, Any],
        reader: _C.StepReader,
        options: _C.StepOptions,
    ) -> tuple[_C.StepResult, bool]:
        """Steps parameters that are plain tensors. If there are others, nothing happens and the result says so.

        Returns:
            The result, and whether states were created, converted or removed for it.
        """
        asked = [self.asked_by(group, index) for index, group in enumerate(groups)]
        rules, precisions, hypers = [list(column) for column in zip(*asked, strict=True)]

        def run(fresh: list[Tensor]) -> _C.StepResult:
            return _C.optim_step(reader, groups, rules, hypers, precisions, state, fresh, options)

        result = run([])
        if result.has_wrappers or not result.missing:
            return result, False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            _, _, label = result.missing[0]
            raise RuntimeError(
                f"drivetrain.optim.{self.class_name}: {label} has no state yet, and every replay of a CUDA graph "
                "would create it again: call step() once before the capture."
            )
        written: list[Replaced] = []
        fresh: list[Tensor] = []
        skipped = True
        try:
            for rule in dict.fromkeys(rules):
                lacking = [(p, groups[i], label) for p, i, label in result.missing if rules[i] == rule]
                fresh += self.complete_states(lacking, rule, state, written)
            result = run(fresh)
            skipped = not result.is_on_device and result.skipped
        finally:
            if skipped:  # The next step is then the first one again.
                _take_back(state, written)
        assert not result.missing, "the step still lacks states after they were created"
        return result, not skipped

    def asked_by(self, group: dict[str, Any], index: int) -> tuple[str, _C.Precision, dict[str, float | Tensor]]:
        """Returns the group's rule, storage formats and numbers; the native code checks the numbers' ranges."""
        try:
            return self.rule.name_of(group), self.precision_of(group), self.rule.hypers(group)
        except KeyError as missing:
            raise ValueError(f"param_groups[{index}] has no {missing}, which {self.class_name} needs") from missing
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"param_groups[{index}]: {error}") from error


def _take_back(states: dict[Tensor, Any], written: list[Replaced]) -> None:
    for param, name, before in reversed(written):
        if not name:
            param.detach().copy_(before)
        elif before is None:
            states[param].pop(name, None)
        else:
            states[param][name] = before
        if not states[param]:
            del states[param]


def counter_device(param: Any) -> torch.device:
    """Returns the device of a parameter's step counter: the parameter's on CUDA, else the CPU."""
    return param.device if isinstance(param, Tensor) and param.is_cuda else torch.device("cpu")
