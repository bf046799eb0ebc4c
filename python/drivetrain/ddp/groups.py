"""Parameters of several process groups in one wrapper, such as experts: each group gets a reducer of its own.

A part is a wrapper of the same module that leaves out all parameters and buffers of other groups. It takes part in
forward and backward through the hooks of the wrapper that a script sees. Under `join()` a rank that has run out of
inputs takes part in the steps of the others.
"""

import fnmatch
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from .. import _C
from ..grad import main_grads
from ..optim.sharded.over_groups import GroupParam, group_params
from .gather import ranks_of
from .hang_reports import waiting
from .reducer import Reducer

BUFFERS = "the broadcast of buffers"
_IGNORED = "_ddp_params_and_buffers_to_ignore"
# Parts refuse these options, which need all gradients of one group or change the divisor of the sum.
_REFUSED = (
    "mixed_precision",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "check_gradients",
    "shard",
)
# Every part gets the wrapper's values of these options.
_SHARED = (
    "broadcast_buffers",
    "forward_sync_buffers",
    "init_sync",
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "transport",
    "check_replicas_every",
    "report_hang_after",
    "wire_dtype",
)


class GroupMembers:
    """The names of the parameters and buffers that one process group reduces.

    Args:
        group: The process group.
        patterns: Patterns that name its parameters.
        names: The matching names of parameters and buffers.
    """

    def __init__(self, group: dist.ProcessGroup, patterns: Sequence[str], names: frozenset[str]) -> None:
        self.group, self.names = group, names
        self.ranks = ranks_of(group)
        self.title = f"{', '.join(patterns)} over ranks {', '.join(map(str, self.ranks))}"

    def view(self, module: nn.Module, ignored: set[str]) -> nn.Module:
        """Returns another object for the module, in which the wrapper sees only this part's parameters."""
        view = nn.Module.__new__(type(module))
        view.__dict__.update(module.__dict__)
        everything = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
        view.__dict__[_IGNORED] = sorted(ignored | (everything - self.names))
        view.__dict__["_drivetrain_title"] = f"{type(module).__name__}, {self.title}"
        return view


def parts_of(
    module: nn.Module, groups: Mapping[str, dist.ProcessGroup] | None, changed: Mapping[str, Any]
) -> list[GroupMembers]:
    """Returns the parts that `expert_groups` asks for, in an order that all ranks share.

    Args:
        module: The module to wrap.
        groups: The argument of DistributedDataParallel.
        changed: Its arguments that differ from their defaults.

    Raises:
        TypeError: A pattern has no process group.
        ValueError: A pattern matches no trained parameter, two groups match one, or this rank is not in a group.
        NotImplementedError: Another argument does not go together with `expert_groups`.
    """
    if not groups:
        return []
    for name in _REFUSED:
        if changed.get(name):
            raise NotImplementedError(f"{name} does not go together with expert_groups: leave one of the two out.")
    ignored = set(getattr(module, _IGNORED, ()))
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored}
    names = [n for n, _ in [*module.named_parameters(), *module.named_buffers()] if n not in ignored]
    taken: dict[str, str] = {}
    found: dict[int, tuple[dist.ProcessGroup, list[str], set[str]]] = {}
    for pattern, group in groups.items():
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"expert_groups[{pattern!r}] is {group!r}, expected a process group that this rank belongs to: leave "
                "out groups of other ranks."
            )
        matching = fnmatch.filter(names, pattern)
        if not any(name in trained for name in matching):
            raise ValueError(
                f"expert_groups[{pattern!r}] matches no parameter that requires a gradient, expected a pattern of "
                f"names such as {next(iter(trained), 'experts.*')!r}."
            )
        for name in matching:
            if (other := taken.setdefault(name, pattern)) != pattern and groups[other] is not group:
                raise ValueError(
                    f"expert_groups gives {name!r} two groups, by {other!r} and {pattern!r}: expected one group each."
                )
            if name in trained and main_grads.is_kept(trained[name]):
                raise NotImplementedError(f"main_grads() does not go together with expert_groups, for {name!r}.")
        _, patterns, of_group = found.setdefault(id(group), (group, [], set()))
        patterns.append(pattern)
        of_group.update(matching)
    if not trained.keys() - taken.keys():
        raise ValueError(
            "expert_groups matches every trained parameter, expected some for process_group: pass the group of all "
            "parameters as process_group instead."
        )
    parts = [GroupMembers(group, patterns, frozenset(matching)) for group, patterns, matching in found.values()]
    return sorted(parts, key=lambda part: part.ranks)  # ranks of several groups wait for them in the same order


@contextmanager
def left_out(module: nn.Module, parts: Sequence[GroupMembers]) -> Iterator[None]:
    """Makes wrappers that are built meanwhile ignore the parts' parameters and buffers."""
    if not parts:
        yield
        return
    before = module.__dict__.get(_IGNORED)
    module.__dict__[_IGNORED] = sorted({*getattr(module, _IGNORED, ()), *(n for part in parts for n in part.names)})
    try:
        yield
    finally:
        del module.__dict__[_IGNORED]
        if before is not None:
            module.__dict__[_IGNORED] = before


class ReducesOverGroups(TorchDistributedDataParallel):
    """The part of the wrapper that carries the wrappers of its parts along, and that torch's Join context calls.

    It marks all waits, for hang reports.
    """

    reducer: Reducer  # type: ignore[assignment]  # torch's wrapper wants its methods, not its type

    def _has_reducer(self) -> bool:
        """Returns False if the all-reduce of every parameter is delayed."""
        return "reducer" in self.__dict__

    def _parts(self) -> Sequence["ReducesOverGroups"]:
        found: Sequence[ReducesOverGroups] = self.__dict__.get("_wrapped_parts", ())
        return found

    def _wrap_parts(self, parts: Sequence[GroupMembers], changed: Mapping[str, Any]) -> None:
        """Wraps the module once more for each part. Its gradients become the sum over its group, divided by all ranks.

        Raises:
            ValueError: A part's group has ranks outside of the wrapper's.
        """
        for _, param in self.reducer.named_parameters() if self._has_reducer() else ():
            if (place := group_params.pop(param, None)) is not None:
                place.scale.remove()
        everyone = set(ranks_of(self.process_group))
        for part in parts:
            if outside := set(part.ranks) - everyone:
                raise ValueError(
                    f"expert_groups: {part.title} has ranks {sorted(outside)} outside of process_group, expected some "
                    f"of its ranks {sorted(everyone)}."
                )
        shared = {name: value for name, value in changed.items() if name in _SHARED}
        wrapped = []
        wrapper_type: Any = type(self)
        ignored = set(getattr(self.module, _IGNORED, ()))
        for part in parts:
            wrapper = wrapper_type(
                part.view(self.module, ignored), process_group=part.group, expert_groups=None, **shared
            )
            factor = len(part.ranks) / len(everyone)
            if factor != 1:
                counts = dist.get_rank() == part.ranks[0]
                for _, param in wrapper.reducer.named_parameters():
                    scale = param.register_hook(partial(torch.mul, other=factor))
                    group_params[param] = GroupParam(scale, weakref.ref(self), counts)
            wrapped.append(wrapper)
        self.__dict__["_wrapped_parts"] = wrapped

    def share(self, values: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> None:
        """Reduces values over all ranks of the wrapper, in place, and names ranks that have ended in its errors."""
        with waiting(self.reducer.progress(), what):
            dist.all_reduce(values, op, group=self.process_group)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        prepared = super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        for part in self._parts():
            part._pre_forward()
        return prepared

    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        for part in self._parts():
            output = part._post_forward(output)
        return output

    def refuse_parts(self, what: str) -> None:
        """Raises NotImplementedError if parameters belong to several groups, which `what` does not support."""
        if self._parts():
            raise NotImplementedError(
                f"{what} does not go together with expert_groups: wrap the parameters of each group on their own."
            )

    def _update_process_group(self, new_process_group: Any) -> None:
        self.refuse_parts("a new process group")
        super()._update_process_group(new_process_group)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> Any:
        self.refuse_parts("a copy of the wrapper")
        return super().__getstate__()  # type: ignore[no-untyped-call]

    # ---- Uneven inputs.

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook of a rank that has run out of inputs, as torch does.

        Raises:
            NotImplementedError: An optimizer steps in backward, or the wrapper has `shard` or `expert_groups`. A rank
                that has run out of inputs has no backward and no step. Also as in torch's Join.
        """
        self.refuse_parts("join()")
        if self.__dict__.get("_sharding") is not None:
            raise NotImplementedError(
                "join() does not go together with shard=. A rank that has run out of inputs takes no steps, and the "
                "others need the rows that it steps. Give every rank as many inputs, or leave shard= out."
            )
        if self._has_reducer() and self.reducer.steps_in_backward:
            raise NotImplementedError(
                "join() does not go together with optimizer.step_in_backward(): a rank that has run out of inputs has "
                "no backward to step in. Give every rank as many inputs, or step after backward."
            )
        return _WatchedJoinHook(super().join_hook(**kwargs), self.reducer.progress())  # type: ignore[no-untyped-call]

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Takes part in the others' backward with zeros. This rank's own `.grad` become their mean."""
        self.reducer.shadow_planning()
        as_sum = not self._divide_by_initial_world_size
        reduces = [self.reducer.reduce_zeros(i, as_sum) for i in range(len(self.reducer.buckets()))]
        for i, reduce in enumerate(reduces):
            self.reducer.wait_for_zeros(i, reduce)

    def _match_unused_params_allreduce(self) -> None:
        """Does nothing: our reducer shares the map of used parameters by another rule than torch's."""

    def _check_and_sync_module_buffers(self) -> None:
        with waiting(self.reducer.progress(), BUFFERS):
            super()._check_and_sync_module_buffers()  # type: ignore[no-untyped-call]

    def _sync_buffers(self) -> None:
        """Broadcasts rank 0's buffers, and marks the wait for hang reports."""
        with waiting(self.reducer.progress(), BUFFERS):
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """Broadcasts buffers of one rank, after the ranks have compared that all are about to."""
        if self._has_reducer() and not hasattr(self, "buffer_hook"):  # a hook may communicate otherwise, or not at all
            self.reducer.announce_buffers()
        try:
            super()._sync_module_buffers(authoritative_rank)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self._has_reducer() and (difference := self.reducer.difference()):
                raise RuntimeError(f"drivetrain: {BUFFERS} has failed: {difference}") from error
            raise

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        self.reducer.announce_agreement()
        with waiting(self.reducer.progress(), "the agreement on whether to synchronize"):
            found: bool | None = super()._check_global_requires_backward_grad_sync(  # type: ignore[no-untyped-call]
                is_joined_rank
            )
        return found

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        with waiting(self.reducer.progress(), "the last broadcast of parameters, in join(),"):
            super()._sync_final_model(is_last_joiner)  # type: ignore[no-untyped-call]


class _WatchedJoinHook(JoinHook):
    """torch's hook of a rank that has run out of inputs. It waits for the others' next step between its calls."""

    def __init__(self, hook: JoinHook, progress: _C.Progress) -> None:
        self._hook = hook
        self._progress = progress
        self._is_waiting = False

    def main_hook(self) -> None:
        self._end_wait()
        self._hook.main_hook()
        self._progress.begin_wait("the beginning, on ranks that still have inputs,")
        self._is_waiting = True

    def post_hook(self, is_last_joiner: bool) -> None:
        self._end_wait()
        self._hook.post_hook(is_last_joiner)

    def _end_wait(self) -> None:
        if self._is_waiting:
            self._progress.end_wait()
        self._is_waiting = False
