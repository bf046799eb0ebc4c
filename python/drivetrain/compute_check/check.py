"""Checks in some steps that a rank computes the gradients that other ranks compute from the same inputs."""

from __future__ import annotations

import hashlib
import io
import operator
import socket
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from ..ddp.consistency import trained_parameters
from ..ddp.gather import gather_objects
from ..ddp.transport import checking_group
from ..planner.calibrate import processor_name
from .repeat import RecordedStep, before, hash_of, repeat, results_of
from .sums import Sums

_MOST_MISSED = 8  # steps in a row that cannot be checked


class ComputeError(RuntimeError):
    """A rank computes something else than the others from the same values.

    Attributes:
        ranks: The ranks of the job that may be at fault. It is one if a third rank, a repetition or the transport has
            decided.
        step: Optimizer steps before it.
        parameter: The first parameter, or state of one, that differs.
    """

    def __init__(self, text: str, ranks: Sequence[int], step: int, parameter: str) -> None:
        super().__init__(text)
        self.ranks, self.step, self.parameter = tuple(ranks), step, parameter

    def __reduce__(self) -> Any:
        return ComputeError, (str(self), self.ranks, self.step, self.parameter)


def check_compute(model: DistributedDataParallel, every: int = 100, on_error: str = "raise") -> ComputeCheck:
    """Compares the computation of ranks from now on, to find processors and GPUs that compute wrongly.

    Processors with a defect give wrong results without an error, at times. In every `every`-th step each rank repeats
    the forward and backward pass of its neighbor. It has the same parameters, and gets inputs, buffers, random states
    and the gradients of the results. The gradients of all parameters must have the same bits. If they differ, a third
    rank repeats the pass and decides which of the two is wrong. With two ranks in all, it is the one whose own
    repetition differs. Checksums of parameters and of the optimizer's states are also compared over ranks. So are sums
    of the reduced gradients with sums of what ranks put into the all-reduce. A warning says where these are no sums,
    as under a communication hook that rounds.

    All ranks must call this, after they have wrapped the model and before its first step. Call it for torch's wrapper
    or drivetrain's. The check takes place when an optimizer of the model begins its step. It takes the time of one
    to two steps in each `every` steps. A rank that always computes wrongly is found at the next check. Wrong gradients
    that occur only between two checks are not found.

    At the first check every rank repeats its own pass. If the bits differ there, the model has operations without a
    fixed order, and a warning says that it cannot be checked. If they differ on some ranks only, it names these. So it
    does if ranks have processors or GPUs of different kinds, and if a backward pass follows several forward passes.

    Args:
        model: The wrapped model, whose parameters are equal on all ranks.
        every: Optimizer steps from one check to the next, at least 1.
        on_error: "raise" raises ComputeError. "skip" warns, and drops the gradients of a step in which a pass was
            wrong, so that the optimizer does nothing. Parameters and states that differ always raise.

    Returns:
        The check, which `remove()` ends.

    Raises:
        TypeError: `model` is no DistributedDataParallel.
        ValueError: `every` is below 1, `on_error` is another text, or they are not the same on all ranks.
        RuntimeError: The model has a check already.
        NotImplementedError: The wrapper has `mixed_precision` or `expert_groups`, or a parameter has a `main_grad`.

        While it trains, every rank raises ComputeError before the optimizer's step, if a rank computes wrongly.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model is a {type(model).__name__}, expected a DistributedDataParallel")
    every = operator.index(every)
    if every < 1:
        raise ValueError(f"every is {every}, expected a number of steps, at least 1")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}, expected 'raise' or 'skip'")
    if getattr(model, "mixed_precision", None) is not None:
        raise NotImplementedError("mixed_precision of the wrapper changes its parameters in forward: use autocast")
    if (refuse := getattr(model, "refuse_parts", None)) is not None:
        refuse("check_compute()")
    if model.__dict__.get("_compute_check") is not None:
        raise RuntimeError("the model has a check already: call its remove() first, on all ranks")
    for name, param in model.module.named_parameters():
        if hasattr(param, "main_grad"):
            raise NotImplementedError(f"parameter {name!r} has a main_grad, which a repetition would add to")
    return ComputeCheck(model, every, on_error)


class ComputeCheck:
    """Is what `check_compute` returns.

    Attributes:
        checks: Comparisons made so far.
        skipped: The errors of the steps that were skipped.
    """

    def __init__(self, model: DistributedDataParallel, every: int, on_error: str) -> None:
        self._model, self._every, self._skips = model, every, on_error == "skip"
        self.skipped: list[ComputeError] = []
        self._params = trained_parameters(model.module)
        self._ids = {id(param) for _, param in self._params}
        self._group = checking_group(model.process_group)  # NCCL's would need device memory for what is sent
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._numbers = dist.get_process_group_ranks(self._group)  # in the job
        self._step = self._num_forwards = self._missed = self.checks = 0
        self._due = 0  # the step of the next check
        self._has_equal_states: bool | None = None  # None until there are states
        self._is_wanted = False
        self._stepping: torch.optim.Optimizer | None = None  # whose step runs now, perhaps with others inside of it
        self._pass: RecordedStep | None = None
        self._sums: Sums | None = None
        self._has_sums: bool | None = None  # None until a step has shown that reduced gradients are sums
        self._why_no_sums = ""  # until it is said
        self._of_params: list[Any] = []  # handles of hooks
        self._handles = [
            model.register_forward_pre_hook(_WeakHook(self, "_begin")),
            model.module.register_forward_pre_hook(_WeakHook(self, "_record"), with_kwargs=True),
            model.register_forward_hook(_WeakHook(self, "_end")),
            register_optimizer_step_pre_hook(_WeakHook(self, "_stepped")),
            register_optimizer_step_post_hook(_WeakHook(self, "_has_stepped")),
        ]
        model.__dict__["_compute_check"] = self  # lives as long as the model does
        told = gather_objects(((every, on_error), _kind(self._params[0][1].device)), self._group)
        if len({one for one, _ in told}) > 1:
            self.remove()
            raise ValueError(f"every and on_error are not the same on all ranks: {[one for one, _ in told]}")
        kinds = [kind for _, kind in told]
        if other := next((kind for kind in kinds if kind != kinds[0]), None):
            self._give_up(f"ranks have different kinds of processors or threads: {kinds[0]} and {other}")

    def remove(self) -> None:
        """Ends the check on this rank. All ranks must call it at the same step."""
        for handle in (*self._handles, *self._of_params):
            handle.remove()
        self._handles, self._of_params, self._pass = [], [], None
        self._model.__dict__.pop("_compute_check", None)

    def __reduce__(self) -> Any:
        return type(None), ()  # copies and files of the model have none

    def _give_up(self, reason: str) -> None:
        self._due = sys.maxsize  # an optimizer that calls its hooks forbids to remove one
        self._forget()
        self._warn(f"{reason}. This run is not checked.")

    def _warn(self, text: str) -> None:
        if self._rank == 0:
            warnings.warn(f"check_compute: {text}", stacklevel=3)

    def _begin(self, model: DistributedDataParallel, args: Any) -> None:
        is_trained = torch.is_grad_enabled() and model.training and model.require_backward_grad_sync
        if not is_trained or self._stepping is not None:  # a closure's passes come after the check
            return
        if self._pass is not None and self._pass.output_grads:  # Its backward has run, and this one's comes alone.
            self._num_forwards = 0
        self._forget()
        self._num_forwards += 1
        self._is_wanted = self._step >= self._due and self._num_forwards == 1

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Records the pass that has begun, once the wrapper has broadcast rank 0's buffers."""
        if self._is_wanted:
            self._is_wanted = False
            self._pass, self._sums = before(module, (args, kwargs)), Sums(self._model, self._params)

    def _end(self, model: DistributedDataParallel, args: Any, output: Any) -> Any:
        if (seen := self._pass) is None or (sums := self._sums) is None or self._of_params:
            return None

        def note(place: int, grad: torch.Tensor | None) -> None:
            if grad is not None:  # the wrapper passes None on for a result that the loss does not use
                seen.output_grads[place] = grad.detach().clone()

        def hash_grad(name: str, grad: torch.Tensor) -> None:
            seen.hashes[name] = hash_of(grad)

        self._of_params = [
            param.register_hook(partial(hash_grad, name)) for name, param in self._params if param.requires_grad
        ]
        if self._has_sums is not False:  # after the hooks of the loop, which may change what is reduced
            self._of_params += [
                param.register_post_accumulate_grad_hook(partial(sums.note, name))
                for name, param in self._params
                if param.requires_grad
            ]
        places = iter(range(len(results_of(output))))

        def outer(result: torch.Tensor) -> torch.Tensor:
            """Returns a copy, whose gradient has no part that comes through another result, such as the loss."""
            if not result.requires_grad:
                return result
            result = result.clone()
            result.register_hook(partial(note, next(places)))
            return result

        return tree_map_only(torch.Tensor, outer, output)

    def _forget(self) -> None:
        for handle in self._of_params:
            handle.remove()
        self._of_params, self._pass, self._sums = [], None, None

    def _has_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._stepping is optimizer:
            self._stepping = None

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (
            # The inner optimizer of another may have no parameters on some ranks. A step that raised is not running.
            self._stepping not in (None, optimizer)
            or self._model._join_config.enable
            or not any(id(param) in self._ids for group in optimizer.param_groups for param in group["params"])
        ):
            return
        self._stepping = optimizer
        step, seen, sums, num_forwards = self._step, self._pass, self._sums, self._num_forwards
        self._step, self._num_forwards = step + 1, 0
        if step >= self._due:
            self._forget()
            is_whole = num_forwards == 1 and seen is not None and bool(seen.output_grads)
            try:
                self._compare(step, seen if is_whole else None, sums, optimizer)
            except ComputeError:
                self._stepping = None  # this step does not run
                raise

    def _compare(
        self, step: int, seen: RecordedStep | None, sums: Sums | None, optimizer: torch.optim.Optimizer
    ) -> None:
        kept = {name: hash_of(param) for name, param in self._params}
        # Sharded states differ between ranks from the first step on, and do not count.
        of_states = {
            f"{name} ({key} of its state)": hash_of(value)
            for name, param in self._params
            for key, value in (optimizer.state.get(param) or {}).items()
            if isinstance(value, torch.Tensor) and not hasattr(value, "to_local")
        }
        own = (seen is not None, _checksum(kept), _checksum(of_states) if of_states else "")
        told = gather_objects(own, self._group)
        if not all(has_pass for has_pass, *_ in told):
            return self._miss(
                "no pass to repeat, which takes one call of the wrapper per step, in training, outside of "
                "optimizer.step(closure). Its result has tensors, in dicts, lists or tuples"
            )
        assert seen is not None
        self._due = step + self._every
        self._compare_kept([one[1] for one in told], kept, step)
        if self._has_equal_states is None and all(one[2] for one in told):
            self._has_equal_states = self._are_equal(of_states)
        if self._has_equal_states:
            self._compare_kept([one[2] for one in told], of_states, step)
        # Comes before a repetition, so that the memory of its gradients is free by then.
        if self._has_sums is not False and sums is not None and self._compare_sums(sums, step):
            return None
        if self.checks == 0:
            again, why_not = self._repeated(seen)
            if why_not is None and again != seen.hashes:
                why_not = (
                    "a repetition of a pass gives other bits: operations have no fixed order, or the loss has terms "
                    "outside of the model's results"
                )
            reasons = gather_objects(why_not, self._group)
            if reason := next((reason for reason in reasons if reason), None):
                ranks = [rank for rank, one in enumerate(reasons) if one]
                if len(ranks) < self._size:
                    reason += f". This is so on {self._described(ranks)} only, whose processor may compute wrongly"
                return self._give_up(reason)
        if self._why_no_sums:
            self._warn(f"{self._why_no_sums}. Sums of the all-reduce are not compared.")
            self._why_no_sums = ""
        self.checks += 1
        if self._size == 1:
            return None
        received, why_not = self._from_neighbor(seen)
        found: dict[str, int] = {}
        parameter = None
        if received is not None:
            found, why_not = self._repeated(received)
            parameter = None if why_not else _first_difference(received.hashes, found)
        told_results = gather_objects((parameter, why_not), self._group)
        if reason := next((reason for _, reason in told_results if reason), None):
            return self._give_up(reason)
        different = next(((rank, name) for rank, (name, _) in enumerate(told_results) if name is not None), None)
        if different is None or received is None:
            self._missed = 0
            return None
        return self._accuse([seen, received], found, *different, step)

    def _compare_sums(self, sums: Sums, step: int) -> bool:
        """Raises ComputeError on every rank, or skips the step, if the all-reduce has given something else than sums.

        The first comparison shows whether they are sums at all. Returns True if the step is skipped.
        """
        was_compared, piece = sums.compare(self._group)
        told = gather_objects((sums.why_not, piece), self._group)
        ranks = [rank for rank, (_, one) in enumerate(told) if one]
        reason = next((reason for reason, _ in told if reason), None)
        if reason is None and self._has_sums is None:
            if was_compared and not ranks:
                self._has_sums = True
            elif was_compared:
                reason = "at its first check, an all-reduce does not give sums"
            elif self.checks + 1 == _MOST_MISSED:
                reason = f"{_MOST_MISSED} checks had too few sums that are larger than what rounding changes"
        if reason is not None:
            self._has_sums, self._why_no_sums = False, reason
        elif (piece := next((one for _, one in told if one), None)) is not None:
            parameter, begin, end = piece
            what = "has received, or keeps, other sums than the rest"
            if len(ranks) == self._size:
                ranks, what = sums.culprits(piece, self._group)
            who = self._described(ranks) if len(ranks) < self._size else f"one of the {self._size} ranks"
            sums.forget()
            error = self._error(
                f"the all-reduce of step {step} gives something else than the sums of the ranks' gradients, in "
                f"elements {begin} to {end - 1} of {parameter!r}: {who} {what}",
                ranks,
                step,
                parameter,
            )
            self._raise_or_skip(error)
            return True
        sums.forget()
        return False

    def _are_equal(self, of_states: dict[str, int]) -> bool:
        """Returns False if an optimizer keeps states that differ between ranks from the first step on.

        Then a state of every parameter differs. A fault changes few.
        """
        hashes = gather_objects(of_states, self._group)
        names = hashes[0].keys()
        differ = [name for name in names if len({one.get(name) for one in hashes}) > 1]
        return all(one.keys() == names for one in hashes) and (not differ or len(differ) < len(self._params))

    def _miss(self, reason: str) -> None:
        """Leaves the check to a later step."""
        self._missed += 1
        if self._missed == _MOST_MISSED:
            self._give_up(f"{_MOST_MISSED} steps had {reason}")

    def _repeated(self, seen: RecordedStep) -> tuple[dict[str, int], str | None]:
        """Returns the hashes of a repetition, or why there are none: every rank must hear of an error."""
        try:
            return repeat(self._model.module, self._params, seen), None
        except Exception as error:
            return {}, f"a pass of {type(self._model.module).__name__} cannot be repeated: {error}"

    def _compare_kept(self, checksums: list[str], own: dict[str, int], step: int) -> None:
        counts = Counter(checksums)
        if len(counts) == 1:
            return
        (usual, most), *others = counts.most_common()
        is_clear = most > sum(count for _, count in others)
        ranks = [rank for rank, one in enumerate(checksums) if one != usual or not is_clear]
        hashes = gather_objects(own, self._group)
        usual_hashes = hashes[checksums.index(usual)]
        name = next(str(_first_difference(usual_hashes, one)) for one in hashes if one != usual_hashes)
        raise self._error(
            f"ranks have different values before step {step}, beginning with {name!r}: {self._described(ranks)}. An "
            "optimizer step, a reduction or memory went wrong there since the last check",
            ranks,
            step,
            name,
        )

    def _accuse(
        self, passes: list[RecordedStep], found: dict[str, int], witness: int, parameter: str, step: int
    ) -> None:
        """Raises ComputeError on every rank, or skips the step, once a third rank or repetitions have decided.

        If no rank's own pass can be repeated, the loss has another way to the parameters, and no rank is wrong.
        `passes`: this rank's own, and the one of the rank before it, whose repetition gave `found`.
        """
        suspect, judge = (witness - 1) % self._size, (witness + 1) % self._size
        seen, received = passes
        passed_on, _ = self._from_neighbor(received)
        asked = {judge: passed_on, witness: received, suspect: seen}.get(self._rank)
        again = {} if asked is None else self._repeated(asked)[0]
        is_steady = self._repeated(seen)[0] == seen.hashes
        told = gather_objects((found, again, seen.hashes, is_steady), self._group)
        if not any(one[3] for one in told):
            self._miss(
                "a loss that reaches parameters without the model's forward pass, or a model that keeps objects of its "
                "own classes from pass to pass"
            )
            return
        first = {suspect: told[suspect][2], witness: told[witness][0]}
        ranks = [rank for rank, hashes in first.items() if told[judge if self._size > 2 else rank][1] != hashes]
        ranks = ranks if len(ranks) == 1 else sorted(first)
        gives = "the same" if told[ranks[0]][1] == first[ranks[0]] else "others"
        error = self._error(
            f"gradients of one pass differ between ranks in step {step}, beginning with {parameter!r}: "
            f"{self._described(ranks)} {'computes' if len(ranks) == 1 else 'compute'} other bits, and a repetition "
            f"there gives {gives}",
            ranks,
            step,
            parameter,
        )
        self._raise_or_skip(error)

    def _error(self, text: str, ranks: Sequence[int], step: int, parameter: str) -> ComputeError:
        return ComputeError(text, [self._numbers[rank] for rank in ranks], step, parameter)

    def _raise_or_skip(self, error: ComputeError) -> None:
        if not self._skips:
            raise error
        self.skipped.append(error)
        for _, param in self._params:
            param.grad = None
        if self._rank == 0:
            warnings.warn(f"check_compute skips a step: {error}", stacklevel=2)

    def _described(self, ranks: Sequence[int]) -> str:
        places = gather_objects(f"{socket.gethostname()}, {self._params[0][1].device}", self._group)
        return " or ".join(f"rank {self._numbers[rank]} ({places[rank]})" for rank in ranks)

    def _from_neighbor(self, seen: RecordedStep) -> tuple[RecordedStep | None, str | None]:
        """Sends a pass to the next rank, and returns the one of the rank before; or None, and why there is none."""
        file, why_not = io.BytesIO(), None
        try:
            torch.save(seen, file)
        except Exception as error:
            why_not = f"the inputs of a pass cannot be sent: {error}"
        told = gather_objects((file.tell(), why_not), self._group)
        if why_not := next((reason for _, reason in told if reason), None):
            return None, why_not
        before, after = (self._numbers[(self._rank + way) % self._size] for way in (-1, 1))
        memory = bytearray(told[self._rank - 1][0])
        sending = dist.isend(torch.frombuffer(file.getbuffer(), dtype=torch.uint8), after, self._group)
        dist.recv(torch.frombuffer(memory, dtype=torch.uint8), before, self._group)
        assert sending is not None  # this rank is in the group
        sending.wait()
        try:
            return torch.load(io.BytesIO(memory), map_location="cpu", weights_only=False), None
        except Exception as error:
            return None, f"the inputs of a pass cannot be read: {error}"


class _WeakHook:
    """Calls a method of a check while there is one. Copies of a model have none."""

    def __init__(self, check: ComputeCheck | None, method: str) -> None:
        self._check, self._method = None if check is None else weakref.ref(check), method

    @_disable_dynamo  # it gathers objects
    def __call__(self, *args: Any) -> Any:
        if self._check is not None and (check := self._check()) is not None:
            return getattr(check, self._method)(*args)
        return None

    def __reduce__(self) -> Any:
        return _WeakHook, (None, self._method)


def _checksum(hashes: dict[str, int]) -> str:
    return hashlib.sha256(repr(hashes).encode()).hexdigest()


def _first_difference(ones: dict[str, int], others: dict[str, int]) -> str | None:
    return next((name for name in {**ones, **others} if ones.get(name) != others.get(name)), None)


def _kind(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return (torch.cuda.get_device_name(device),)
    return processor_name(), f"{torch.get_num_threads()} threads"
