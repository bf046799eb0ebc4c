"""Steps on the CPU for parameters on a GPU: twins in pinned memory take the parameters' place while a step runs."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .engine import Engine, is_capturing
from .kept import kept_of
from .native_step import step_groups
from .rule import Group, part_of_group
from .sharded import over_groups, pieces
from .sharded.dtensors import is_dtensor, set_gradient
from .sharded.step import sums_of_whole_squares

_POOL = (1 << 60, 1 << 20)  # bytes: no limit, and the size of the smallest slab
_NOW = -1  # the bucket of what step() steps itself
_Place = tuple[int, int, Tensor]  # the index of a parameter's group, its place in that, and it


def check(offload: str | None, class_name: str, params: Sequence[Tensor] = ()) -> None:
    """Raises ValueError for an unknown argument `offload`, and for a class or parameters that do not support it."""
    if offload not in (None, "cpu"):
        raise ValueError(f"offload is {offload!r}, expected None or 'cpu'")
    if offload is not None and class_name == "Muon":
        raise ValueError("offload is 'cpu', but Muon's matrix products are for the GPU: leave offload out")
    for index, param in enumerate(params if offload is not None else ()):
        if is_dtensor(param):
            raise ValueError(f"offload is 'cpu', but parameter {index} of the group is a DTensor: leave one out")


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor's elements in the order in which `like` has them in memory."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what changes when a tensor's values, memory or dtype do."""
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride()


def _norm(tensor: Tensor) -> Tensor:
    """Returns the 2-norm, which shows changes that torch does not count: a GradScaler's, and those through `.data`."""
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else None
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=wide)
    return norm.double()


class Twin:
    """A parameter's values on the host. They leave the device again when a script has changed them there."""

    def __init__(self, param: Tensor, pool: _C.OffloadPool) -> None:
        if param.stride() != torch.empty_like(param, device="meta").stride():
            raise ValueError(f"offload is 'cpu', but a parameter of shape {tuple(param.shape)} has gaps in memory")
        self._param, self.copy = param, pool.begin(_flat(param, param))
        self.note_values()
        self.tensor = torch.empty(0)
        self.gradient: _C.Offloaded | None = None  # on its way, or there, until a step has used it
        self._gradient_mark: tuple[Any, ...] = ()
        self.gradient_norm = self.norm  # when it left

    def note_values(self) -> None:
        """Notes that the device has the host's values."""
        self.mark, self.norm = _mark(self._param), _norm(self._param)

    def send_gradient(self, pool: _C.OffloadPool) -> None:
        """Starts to copy the gradient to the host, unless it has left since its last change."""
        grad = self._param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise NotImplementedError("offload is 'cpu', but a gradient is sparse: leave offload out for its parameter")
        if self.gradient is None or self._gradient_mark != _mark(grad):
            self.gradient = None  # returns its memory first
            self.gradient, self._gradient_mark = pool.begin(_flat(grad, self._param)), _mark(grad)
            self.gradient_norm = _norm(grad)

    def receive(self) -> Tensor:
        """Returns the values as a tensor with the gradient that has left. The host waits for both."""
        shape, strides = self._param.shape, self._param.stride()
        self.tensor = self.copy.host().as_strided(shape, strides)
        set_gradient(self.tensor, None if self.gradient is None else self.gradient.host().as_strided(shape, strides))
        return self.tensor

    def sums(self) -> Tensor:
        """Returns the sums of squares of the gradient's chunks, in the order of its memory: float64 [chunks]."""
        assert self.gradient is not None
        flat = self.gradient.host()
        return _C.chunk_sums(torch.view_as_real(flat).view(-1) if flat.is_complex() else flat)

    def end_step(self) -> None:
        """Gives the memory of the gradient back."""
        self.tensor.grad = self.gradient = None

    def send(self) -> None:
        """Starts to copy the values to the device."""
        self.copy.copy_back_to(_flat(self._param, self._param))


def send_values(twins: Sequence[Twin]) -> None:
    """Starts to copy values to the device after a step, for later work of the current stream."""
    for twin in twins:
        twin.end_step()
        twin.send()
    for twin in twins:
        twin.copy.await_copy_back()
        twin.note_values()


class Chunk:
    """A part of a step that is due: the first use of its parameters makes it, and waits for their values."""

    def __init__(self, twins: list[Twin], run: Callable[[], _C.StepResult]) -> None:
        self._twins = twins
        self._run: Callable[[], _C.StepResult] | None = run

    @property
    def is_due(self) -> bool:
        """True until the CPU has stepped the parameters."""
        return self._run is not None

    def wait(self) -> None:
        """Steps unless that was done, and makes the current stream wait for the values."""
        if is_capturing():
            raise RuntimeError("a CUDA graph captures a use of parameters whose step is due: call wait() before it")
        if self._run is not None:
            self._run()
            self._run = None
            send_values(self._twins)
        else:
            for twin in self._twins:
                twin.copy.await_copy_back()

    def is_done(self) -> bool:
        """Returns whether the device has the values."""
        return not self.is_due and all(twin.copy.is_back() for twin in self._twins)


class Twins:
    """The twins of an optimizer's parameters, with the pools of their memory."""

    def __init__(self) -> None:
        self._pool, self.gradient_pool = _C.OffloadPool(*_POOL), _C.OffloadPool(*_POOL)
        self._twins: dict[Tensor, Twin] = {}
        self._readers: defaultdict[int, _C.StepReader] = defaultdict(_C.StepReader)  # by bucket

    def of(self, param: Tensor, *, with_gradient: bool = False) -> Twin:
        """Returns the parameter's twin. Current values are on their way or there, as is the gradient on request."""
        twin = self._twins.get(param)
        if twin is None or twin.mark != _mark(param):
            self._twins.pop(param, None)  # returns its memory first
            twin = self._twins[param] = Twin(param, self._pool)
        if with_gradient:
            twin.send_gradient(self.gradient_pool)
        return twin

    def begin_comparison(self, params: Iterable[Tensor]) -> Callable[[], set[Tensor]]:
        """Lets the devices compare values and gradients with those that have left.

        Returns:
            A function that returns the parameters of those that differ, which then leave again. The host waits in it.
        """
        norms: list[tuple[Tensor, Tensor, Tensor]] = []  # the parameter, the norm now and the norm when it left
        for param in params:
            if (twin := self._twins.get(param)) is not None:
                norms.append((param, _norm(param), twin.norm))
                if twin.gradient is not None and param.grad is not None:
                    norms.append((param, _norm(param.grad), twin.gradient_norm))
        if not norms:
            return set
        of, now, before = zip(*norms, strict=True)
        stacked = torch.stack([norm.to(now[0].device) for norm in now + before]).view(2, -1)
        differ = stacked[0] != stacked[1]

        def changed() -> set[Tensor]:
            result = {param for param, is_other in zip(of, differ.tolist(), strict=True) if is_other}
            for param in result:
                del self._twins[param]
            return result

        return changed

    def step(self, engine: Engine, options: _C.StepOptions) -> _C.StepResult:
        """Steps the parameters that have a gradient, and leaves overlapped buckets to their first use."""
        overlapped = engine.kept.overlapped
        params = set(engine.params())
        self._twins = {param: twin for param, twin in self._twins.items() if param in params}
        changed = self.begin_comparison(param for param in engine.params() if param.grad is not None)
        every: list[_Place] = []
        buckets: defaultdict[int, list[_Place]] = defaultdict(list)
        here: dict[Tensor, Tensor] = {}  # stand-ins
        there: dict[Tensor, Twin] = {}
        sums: dict[Tensor, Tensor] = {}
        groups = []  # as they are now, because a scheduler may change them before a chunk is stepped
        for index, group in enumerate(engine.param_groups):
            names = (name for name in ("params", "param_names") if name in group)
            numbers = {name: v.clone() for name, v in group.items() if isinstance(v, Tensor)}
            groups.append({**group, **numbers, **{name: [*group[name]] for name in names}})
            for place, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                here[param] = param
                if param.device.type != "cpu":
                    there[param] = self.of(param, with_gradient=True)
                every.append((index, place, param))
                buckets[_NOW if overlapped is None else overlapped.bucket_of.get(id(param), _NOW)].append(every[-1])

        def receive(params: Iterable[Tensor]) -> None:
            for param in params:
                twin = there[param] = self.of(param, with_gradient=True)
                here[param] = twin.receive()
                if options.measures:  # while other gradients are on their way
                    sums[here[param]] = twin.sums()

        receive(reversed(list(there)))  # as backward went
        receive(changed())

        def chosen(places: Iterable[_Place]) -> list[Group]:
            of_groups: list[dict[int, Tensor]] = [{} for _ in groups]
            for index, place, param in places:
                of_groups[index][place] = here[param]
            pairs = zip(groups, of_groups, strict=True)
            return [part_of_group(group, [*chosen], [*chosen.values()]) for group, chosen in pairs]

        state = engine.optimizer.state

        def run(bucket: int, places: list[_Place], at_step: dict[Tensor, Any] | None = None) -> _C.StepResult:
            """Steps a bucket. A script may have changed optimizer.state since the step that had the states at_step."""
            params = [param for _, _, param in places]
            known = {p: state[p] for p in params if p in state} if at_step is None else at_step
            states: dict[Tensor, Any] = defaultdict(dict, {here[p]: values for p, values in known.items() if values})
            _to_host(states.values())
            result = step_groups(engine, chosen(places), self._readers[bucket], options, states)
            for param in params:
                if (values := states.get(here[param])) is None:
                    continue
                if at_step is None:
                    state[param] = values
                else:
                    at_step[param].update(values)
            return result

        if options.measures:
            options.sum_of_squares = sums_of_whole_squares(engine.rule, chosen(every), sums)
        result = run(_NOW, now := buckets.pop(_NOW, []))
        for bucket, places in [(_NOW, now), *buckets.items()]:
            twins = [there[param] for _, _, param in places if param in there]
            if result.skipped:
                for twin in twins:
                    twin.end_step()
            elif overlapped is not None and bucket != _NOW:
                at_step = {param: state[param] for _, _, param in places}
                overlapped.due.begin(
                    bucket, functools.partial(Chunk, twins, functools.partial(run, bucket, places, at_step))
                )
            else:
                send_values(twins)
        return result


def _to_host(states: Any) -> None:
    """Moves states to the CPU, for example Adagrad's first sums."""
    for values in states:
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                values[name] = value.cpu()


class OnHost:
    """The stand-ins for parameters of devices in an optimizer's groups and state.

    With values it is the twins of parameters that have a state. Others have a tensor of their shape and dtype.
    """

    def __init__(self, optimizer: Any, twins: Twins, *, with_values: bool, with_gradients: bool) -> None:
        self._optimizer = optimizer
        self._params = [p for group in optimizer.param_groups for p in group["params"] if p.device.type != "cpu"]
        self._twins: dict[Tensor, Twin] = {}
        twins.begin_comparison(self._params if with_values else ())()
        for param in self._params if with_values else ():
            has_gradient = with_gradients and param.grad is not None
            if has_gradient or optimizer.state.get(param):
                self._twins[param] = twins.of(param, with_gradient=has_gradient)
        shells = [torch.empty((), dtype=p.dtype).expand(p.shape).requires_grad_(p.requires_grad) for p in self._params]
        pairs = zip(self._params, shells, strict=True)
        self._stand_ins = [self._twins[param].receive() if param in self._twins else shell for param, shell in pairs]

    def put(self) -> None:
        """Puts the stand-ins in the parameters' place, and their states on the host."""
        self._replace(self._params, self._stand_ins)
        optimizer = self._optimizer
        _to_host(optimizer.state[each] for each in self._stand_ins if each in optimizer.state)

    def of(self, param: Tensor) -> Tensor:
        """Returns what has a parameter's values: its twin, or the parameter itself."""
        return self._twins[param].tensor if param in self._twins else param

    def back(self) -> None:
        """Puts the parameters back."""
        self._replace(self._stand_ins, self._params)
        for twin in self._twins.values():
            twin.end_step()

    def send(self) -> None:
        """Copies the twins' values to the device, for later work of the current stream."""
        send_values([*self._twins.values()])

    def _replace(self, before: list[Tensor], after: list[Tensor]) -> None:
        by_id = {id(old): new for old, new in zip(before, after, strict=True)}
        for group in self._optimizer.param_groups:
            group["params"] = [by_id.get(id(param), param) for param in group["params"]]
        state = self._optimizer.state
        entries = [(by_id.get(id(key), key), values) for key, values in state.items()]
        state.clear()
        state.update(entries)


def begin(engine: Engine) -> Twins | None:
    """Returns the optimizer's twins once nothing is due, or None if the CPU steps no parameter of a device.

    Raises:
        ValueError: Ranks share the parameters or their norm.
        RuntimeError: A CUDA graph captures the call.
    """
    if not engine.has_twins:
        return None
    kept, shared = engine.kept, pieces.has_any(engine.optimizer) and "shard"
    if shared or over_groups.has_any(engine.params()):
        raise ValueError(
            f"offload is 'cpu', but DistributedDataParallel has {shared or 'expert_groups'}: leave one of the two out"
        )
    if is_capturing():
        raise RuntimeError("offload is 'cpu', but a CUDA graph cannot capture work of the CPU: step outside of it")
    if kept.overlapped is not None:
        kept.overlapped.wait()
    kept.twins = kept.twins or Twins()
    return kept.twins


@contextmanager
def on_host(optimizer: Any, *, with_values: bool = True, with_gradients: bool = False) -> Iterator[OnHost | None]:
    """Puts the parameters of devices on the CPU while the block runs, if the optimizer has offload="cpu"."""
    if kept_of(optimizer).offload is None or (twins := begin(Engine(optimizer))) is None:
        yield None
        return
    found = OnHost(optimizer, twins, with_values=with_values, with_gradients=with_gradients)
    try:
        found.put()
        yield found
    finally:
        found.back()
