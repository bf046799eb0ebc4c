"""Runs the native step over parameter groups, and creates and converts the states that it needs.

It takes dense gradients. Where torch's class takes sparse ones, as `nn.Embedding(sparse=True)` gives them, torch's own
functions step their parameters after the others: the rule has them as `step_sparse`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import precision
from .engine import Engine, is_capturing
from .rule import Group, part_of_group
from .sharded import over_groups
from .sharded.dtensors import label_of
from .sharded.step import Shards


def complete_states(
    engine: Engine, params: Sequence[tuple[Tensor, Group, str]], rule: str, states: dict[Tensor, Any]
) -> list[Tensor]:
    """Creates missing states under torch's names, and converts states to the storage format that their group asks for.

    Runs in one pass per device without waiting for it. Parameters come with their groups and labels.

    Returns:
        The parameters that had no state of the rule: this is their first step.
    """
    fresh = []
    conversions = _C.Conversions()
    precisions = {id(group): engine.precision_of(group) for _, group, _ in params}
    # float32, as torch keeps it by default (float64 where that is the default dtype).
    step_dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    # Creates states name by name, so that later steps find the tensors of each name side by side in memory.
    for param, group, _ in params:
        state, device = states[param], counter_device(param)
        if state.get("step") is None and _C.optim_counts_steps(rule, precisions[id(group)]):
            state["step"] = conversions.new_counter(device, step_dtype)
        for name in _C.optim_scalars(rule):
            if state.get(name) is None:
                dtype = engine.rule.scalar_dtype or step_dtype
                state[name] = conversions.new_counter(device, dtype, engine.rule.initial(group, name))
    for name, kind in _C.optim_states(rule):
        for param, group, label in params:
            fill = None if name == engine.rule.copies else engine.rule.initial(group, name)
            if precision.make_state(states[param], name, kind, param, precisions[id(group)], label, fill, conversions):
                fresh.append(param)
    for param, group, label in params:
        precision.make_extra(states[param], param, precisions[id(group)], label, conversions)
    conversions.run()
    return fresh


def step_all(engine: Engine, reader: _C.StepReader, options: _C.StepOptions) -> _C.StepResult:
    """Steps dense gradients natively, and sparse ones with torch's function where torch's class accepts them."""
    kept, step_sparse = engine.kept, engine.rule.step_sparse
    if not kept.may_be_sparse:
        try:
            return step_groups(engine, engine.param_groups, reader, options)
        except RuntimeError:
            # Nothing has changed. Checking every step for sparse gradients would take time for each parameter.
            if step_sparse is None or not has_sparse(engine.param_groups):
                raise
            kept.may_be_sparse = True
    assert step_sparse is not None
    dense_groups, sparse_groups = split_sparse(engine.param_groups)
    is_scaled = any(getattr(engine.optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    if sparse_groups and (options.measures or is_scaled):
        raise NotImplementedError(
            f"drivetrain.optim.{engine.class_name}: a gradient is sparse, which neither max_grad_norm nor an "
            "unscaling step supports: leave max_grad_norm and fused=True out, and use torch.amp.GradScaler."
        )
    result = step_groups(engine, dense_groups, reader, options)
    with torch.no_grad():
        for group in sparse_groups:
            step_sparse(engine.optimizer, group, group["params"])
            for param in group["params"] if kept.zero_grads_in_step else []:
                param.grad.zero_()
    return result


@torch.no_grad()
def step_groups(
    engine: Engine,
    groups: list[Group],
    reader: _C.StepReader,
    options: _C.StepOptions,
    state: dict[Tensor, Any] | None = None,
) -> _C.StepResult:
    """Steps `groups`: this optimizer's groups, or copies of them with some of their parameters.

    The reader keeps what it read, so use one reader for the same parameters each time. `state` takes the place of the
    optimizer's.
    """
    if not all(isinstance(group["params"], list) for group in groups):  # but a tuple, a ParameterList, ...
        groups = [{**group, "params": list(group["params"])} for group in groups]

    run = functools.partial(_step_plain, engine, reader)
    kept, state = engine.kept, engine.optimizer.state if state is None else state
    is_over_ranks = options.measures and over_groups.has_any(param for group in groups for param in group["params"])
    if kept.shards is None and not is_over_ranks:
        result, _ = run(groups, state, options)
        if not result.has_wrappers:
            return result
    kept.shards = kept.shards or Shards(engine.rule)
    return kept.shards.step(groups, state, options, run)


def _step_plain(
    engine: Engine, reader: _C.StepReader, groups: list[Group], state: dict[Tensor, Any], options: _C.StepOptions
) -> tuple[_C.StepResult, bool]:
    """Steps parameters that are plain tensors. If there are others, nothing happens and the result says so.

    Returns:
        The result, and whether states were created, converted or removed for it.
    """
    asked = [engine.asked_by(group, index) for index, group in enumerate(groups)]
    rules, precisions, hypers = [one[0] for one in asked], [one[1] for one in asked], [one[2] for one in asked]

    def run(fresh: list[Tensor]) -> _C.StepResult:
        return _C.optim_step(reader, groups, rules, hypers, precisions, state, fresh, options)

    result = run([])
    if result.has_wrappers or not result.missing:
        return result, False
    if is_capturing():
        _, _, label = result.missing[0]
        raise RuntimeError(
            f"drivetrain.optim.{engine.class_name}: {label} has no state yet, and every replay of a CUDA graph "
            "would create it again: call step() once before the capture."
        )
    before = []  # the values of parameters that a conversion of their states may round, and the entries of all states
    for param, _, _ in result.missing:
        is_rounded = any(name in state.get(param, {}) for name in precision.EXTRA_NAMES)
        before.append((param, param.detach().clone() if is_rounded else None, dict(state.get(param, {}))))
    fresh: list[Tensor] = []
    skipped = True
    try:
        for rule in dict.fromkeys(rules):
            lacking = [(p, groups[i], label) for p, i, label in result.missing if rules[i] == rule]
            fresh += complete_states(engine, lacking, rule, state)
        result = run(fresh)
        skipped = not result.is_on_device and result.skipped
    finally:
        if skipped:  # The next step is then the first one again.
            for param, values, entries in before:
                _take_back(state, param, values, entries)
    assert not result.missing, "the step still lacks states after they were created"
    return result, not skipped


def _take_back(states: dict[Tensor, Any], param: Tensor, values: Tensor | None, entries: dict[str, Any]) -> None:
    if values is not None:
        param.detach().copy_(values)
    if not entries:
        states.pop(param, None)
        return
    states[param].clear()
    states[param].update(entries)


def counter_device(param: Any) -> torch.device:
    """Returns the device of a parameter's step counter: the parameter's on CUDA, else the CPU."""
    return param.device if isinstance(param, Tensor) and param.is_cuda else torch.device("cpu")


def has_sparse(groups: list[Group]) -> bool:
    """Returns whether any gradient is sparse."""
    return any(param.grad is not None and param.grad.is_sparse for group in groups for param in group["params"])


def split_sparse(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Returns every group with its dense gradients' parameters, and the groups of parameters with sparse ones.

    Raises:
        NotImplementedError: A group with a sparse gradient asks for a storage format of drivetrain.
        RuntimeError: A group with a sparse gradient has weight decay, which torch cannot apply to it.
    """
    dense, sparse = [], []
    for index, group in enumerate(groups):
        is_sparse = [param.grad is not None and param.grad.is_sparse for param in group["params"]]
        places = [place for place, found in enumerate(is_sparse) if found]
        dense.append(part_of_group(group, [place for place, found in enumerate(is_sparse) if not found]))
        if not places:
            continue
        label = label_of(group, index, places[0])
        asked = [f"{name}={group[name]!r}" for name, no in precision.DEFAULTS.items() if group.get(name, no) != no]
        if asked:
            raise NotImplementedError(
                f"{label} has a sparse gradient, which {', '.join(asked)} cannot step: put it into a group without "
                "that, or set sparse=False in its Embedding."
            )
        if group["weight_decay"] != 0:
            raise RuntimeError(
                f"{label} has a sparse gradient, with which weight_decay={group['weight_decay']} is not compatible: "
                "put it into a group with weight_decay=0."
            )
        sparse.append(part_of_group(group, places))
    return dense, sparse
