"""Records operations on tensors that have shapes and no values."""

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..monitor.flops import flops_of
from ..optim import step as steps
from ..optim.engine import Engine
from ..optim.report import states_of_step
from .replay import bytes_kept_by_recurrence
from .trace import (
    ALLOC,
    FREE,
    OP,
    STEP,
    Block,
    Category,
    Event,
    OpCall,
    Operand,
    Phase,
    Signature,
    StepTrace,
    TensorSpec,
)

_aten = torch.ops.aten
# Factories of up to so many elements compute their values, which code such as `step.item()` may ask for.
_SMALL = 65536
_NEVER_FAKE = {_aten.randperm.default, _aten.randperm.generator}


class Recorder(TorchDispatchMode):
    """Runs operations on tensors without values, and records them."""

    def __init__(self, trace: StepTrace, modules: list[str], label: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.optimizer: torch.optim.Optimizer | None = None  # whose step runs
        self.optimizers_task = -1  # the graph task that runs this step, as with step_in_backward
        self.accumulations: dict[int, tuple[int, ...]] = {}  # operations of the engine: blocks that they may reuse
        self.on_device: set[int] | None = None  # blocks on the planned device; None: all of them
        self.is_moving = False  # whether a call moves data to the planned device
        self.begins_empty = False  # a tensor that no operation has made was made when it is first seen, as in a script
        self._trace, self._modules, self._label = trace, modules, label  # modules whose forward runs
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._blocks: dict[int, int] = {}  # by id of the storage
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # by id: tensors of the model, and their stand-ins
        self._module_of_node: dict[int, str] = {}
        self._signatures: dict[Any, int] = {}
        self._questions = 0  # of optimizers for values
        self._is_above_positive = False  # the last operation was a comparison with a number above 0
        self._is_over = False

    # ---- Storages.

    def know(self, tensor: Tensor, category: Category, parameter: int, name: str) -> None:
        """Notes a tensor that exists before the step, and makes its stand-in."""
        if isinstance(tensor, FakeTensor):
            self._existing(tensor, category, parameter, name)
            return
        block = self._existing(tensor, category, parameter, name)
        is_counter = category == "optimizer states" and tensor.numel() == 1 and not tensor.is_meta
        fake = tensor.detach().clone() if is_counter else self._stand_in(tensor)  # a counter's value is asked for
        self._fakes[id(tensor)] = (tensor, fake)
        self._blocks[id(fake.untyped_storage())] = block

    def _existing(self, tensor: Tensor, category: Category, parameter: int = -1, name: str = "") -> int:
        storage = tensor.untyped_storage()
        if id(storage) in self._blocks:
            found = self._trace.blocks[self._blocks[id(storage)]]
            if category != "inputs":
                found.category, found.parameter, found.name = category, parameter, name
                if self.on_device is not None and self._blocks[id(storage)] not in self.on_device:
                    self.on_device.add(self._blocks[id(storage)])
                    found.op = -1  # made on the host, and moved before the step
            return self._blocks[id(storage)]
        if category == "inputs" and (self.on_device is not None or hasattr(storage, "is_of_others")):
            category = "host"
        is_made_now = self.begins_empty and self.on_device is None
        block = self._new_block(storage, category, len(self._trace.ops) if is_made_now else -1, name)
        if is_made_now and category != "host":
            self._trace.events.append(Event(ALLOC, block))
        if self.on_device is not None and category != "host":
            self.on_device.add(block)
        self._trace.blocks[block].parameter = parameter
        return block

    def mark(self, tensor: Tensor, category: Category, parameter: int) -> None:
        """Sets the category of a tensor's block."""
        index = self._blocks.get(id(tensor.untyped_storage()))
        if index is not None and self._trace.blocks[index].category in ("activations", "temporary"):
            block = self._trace.blocks[index]
            block.category, block.parameter = category, parameter

    def _new_block(self, storage: torch.UntypedStorage, category: Category, op: int, name: str) -> int:
        index = len(self._trace.blocks)
        self._trace.blocks.append(Block(storage.nbytes(), category, op, -1, name))
        self._blocks[id(storage)] = index
        self._watch(storage, index)
        return index

    def _watch(self, storage: torch.UntypedStorage, frees: int | None) -> None:
        """Removes the entry of a storage when it is gone, as another may get its id, and records that a block is."""
        key = id(storage)

        def gone(_: object) -> None:
            if self._blocks.pop(key, None) is not None and frees is not None and not self._is_over:
                self._trace.events.append(Event(FREE, frees))
            self._watched.pop(key, None)

        self._watched[key] = weakref.ref(storage, gone)

    def finish(self) -> None:
        self._is_over = True
        self._watched.clear()
        self._fakes.clear()

    # ---- Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("prim", "profiler"):  # such as the question for a device
            return func(*args, **(kwargs or {}))
        flat, structure = tree_flatten((args, kwargs or {}))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        has_values = self._has_values(func, tensors, flat)
        if func is _aten._local_scalar_dense.default and not has_values:
            return self._plausible(tensors[0])
        self._is_above_positive = func is _aten.gt.Scalar and args[1] > 0
        if has_values:
            if any(id(tensor) in self._fakes for tensor in tensors):
                flat = [self._fakes[id(value)][1] if id(value) in self._fakes else value for value in flat]
                args, kwargs = tree_unflatten(flat, structure)
            result = func(*args, **(kwargs or {}))
        else:
            flat = [self._without_values(value) for value in flat]
            args, kwargs = tree_unflatten(flat, structure)
            with self._fake_mode:
                result = func(*args, **kwargs)
                if func is _aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():
                    with _disable_current_modes():
                        kept = bytes_kept_by_recurrence(args)
                    result = (*result[:3], torch.empty(kept, dtype=torch.uint8, device=self._label))
        self._record(func, args, kwargs or {}, flat, structure, result, tensors)
        return result

    def _has_values(self, func: Any, tensors: list[Tensor], flat: list[Any]) -> bool:
        """Returns whether the operation is computed: only small factories and data that the caller made are."""
        if func in _NEVER_FAKE:
            return True
        if any(isinstance(value, torch.device) and value.type == "meta" for value in flat):
            return False
        if tensors:
            stand_ins = (self._fakes[id(t)][1] if id(t) in self._fakes else t for t in tensors)
            return not any(isinstance(t, FakeTensor) or t.is_meta for t in stand_ins)
        # An upper bound, as strides and fill values count too.
        return math.prod(value for value in flat if type(value) is int and value > 0) <= _SMALL

    def _without_values(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return self._label
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) in self._fakes:
            return self._fakes[id(value)][1]
        fake = self._stand_in(value)
        self._blocks[id(fake.untyped_storage())] = self._existing(value, "inputs", -1, _described(value))
        self._watch(fake.untyped_storage(), None)
        return fake

    def _stand_in(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes(), torch.no_grad():
            meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            return cast(Tensor, FakeTensor(self._fake_mode, meta, self._label))

    def _record(
        self, func: Any, args: Any, kwargs: Any, flat: list[Any], structure: Any, result: Any, given: list[Tensor]
    ) -> None:
        trace, number = self._trace, len(self._trace.ops)
        results = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        tensors = [value for value in flat if isinstance(value, Tensor)]
        reads = tuple(dict.fromkeys(self._blocks.get(id(t.untyped_storage()), -1) for t in tensors))
        for tensor in given:  # data of the caller
            if not isinstance(tensor, FakeTensor) and id(tensor.untyped_storage()) not in self._blocks:
                self._existing(tensor, "inputs", -1, _described(tensor))
        operands = tuple(
            Operand(self._blocks.get(id(t.untyped_storage()), -1), int(t.storage_offset())) for t in tensors
        )
        phase, is_recomputation, node = self._where()
        trace.events.append(Event(OP, number))
        writes = []
        for tensor in results:
            storage = tensor.untyped_storage()
            block = self._blocks.get(id(storage))
            if block is None:
                category: Category = "activations" if phase == "forward" or is_recomputation else "temporary"
                is_there = self.on_device is None or self.is_moving or not self.on_device.isdisjoint(reads)
                block = self._new_block(storage, category if is_there else "host", number, _described(tensor))
                if is_there:
                    trace.events.append(Event(ALLOC, block))
                if is_there and self.on_device is not None:
                    self.on_device.add(block)
            writes.append(block)
        is_view = _is_view_op(func)
        if not is_view and phase == "backward" and not is_recomputation and (node is None or node == "accumulate"):
            self.accumulations[number] = reads
        size = 0 if is_view else sum(map(_touched, tensors)) + sum(map(_touched, results))
        dtype = str(results[0].dtype)[6:] if results else "float32"
        trace.ops.append(
            OpCall(
                name=str(func._schema.name),
                module=self._module(phase, is_recomputation),
                phase=phase,
                is_recomputation=is_recomputation,
                flops=flops_of(func, args, kwargs, result),
                num_bytes=size,
                dtype=dtype,
                reads=tuple(read for read in reads if read >= 0),
                writes=tuple(dict.fromkeys(writes)),
                signature=-1 if is_view else self._signature(func, flat, structure),
                operands=operands,
                results=tuple(writes),
            )
        )

    def _where(self) -> tuple[Phase, bool, str | None]:
        """Returns the phase, whether forward is recomputed, and the name of the graph's node that runs."""
        graph_task = torch._C._current_graph_task_id()
        # A closure given to the optimizer's step runs with gradients on, and its backward is another graph task.
        if self.optimizer is not None and graph_task == self.optimizers_task and not torch.is_grad_enabled():
            return "optimizer", False, ""
        if graph_task == -1:
            return "forward", False, ""
        node = torch._C._current_autograd_node()
        name = None if node is None else "accumulate" if "AccumulateGrad" in node.name() else ""
        return "backward", torch.is_grad_enabled(), name

    def _plausible(self, tensor: Tensor) -> bool | int | float:
        """Returns a value for code that asks a tensor without values for its one element."""
        if self.optimizer is None or torch.is_grad_enabled():
            return plausible(tensor.dtype)
        # LBFGS looks at values: its search goes on as long as it may. It improves, has not converged, and goes down.
        self._questions += 1
        if tensor.dtype == torch.bool:
            return self._is_above_positive
        return 1.0 / self._questions if tensor.dtype.is_floating_point else 1

    def _module(self, phase: Phase, is_recomputation: bool) -> str:
        if phase == "optimizer":
            return "optimizer"
        if phase == "forward" or is_recomputation:
            module = self._modules[-1] if self._modules else ""
            self._module_of_node[_get_sequence_nr() - 1] = module
            return module
        node = torch._C._current_autograd_node()
        return "" if node is None else self._module_of_node.get(node._sequence_nr(), "")

    def _signature(self, func: Any, flat: list[Any], structure: Any) -> int:
        arguments = tuple(
            TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, Tensor) else value
            for value in flat
        )
        if any(isinstance(value, (torch.Generator, torch.ScriptObject, torch.UntypedStorage)) for value in arguments):
            return -1
        try:
            key = (func, arguments)
            found = self._signatures.get(key)
        except TypeError:  # an argument without a hash
            return -1
        if found is None:
            found = self._signatures[key] = len(self._trace.signatures)
            self._trace.signatures.append(Signature(func, arguments, structure))
        return found


@functools.cache
def _is_view_op(func: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def _touched(tensor: Tensor) -> int:
    """Returns the bytes of a tensor, where expanded dimensions count once."""
    sizes = (size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return math.prod(sizes) * tensor.element_size()


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"


def plausible(dtype: torch.dtype) -> bool | int | float:
    """Returns the value that a plan takes for each element of a tensor without values."""
    if dtype == torch.bool:
        return True  # as of torch.isfinite(loss).all()
    return 1.0 if dtype.is_floating_point else 1


@contextlib.contextmanager
def native_steps(trace: StepTrace, params: dict[int, int]) -> Iterator[None]:
    """Makes steps of drivetrain's optimizers record the states that they would allocate, inside of the block.

    `params` has the numbers of parameters by id.
    """
    known: set[tuple[int, str]] = set()

    def step(engine: Engine, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer, moved = engine.optimizer, 0
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                there = optimizer.state.get(param, {})
                moved += 3 * param.numel() * param.element_size()
                for name, size in states_of_step(engine, param, group).items():
                    moved += 2 * size
                    if name not in there and (id(param), name) not in known:
                        known.add((id(param), name))
                        trace.events.append(Event(ALLOC, len(trace.blocks)))
                        index = params.get(id(param), -1)
                        trace.blocks.append(Block(size, "optimizer states", len(trace.ops), index, name))
        trace.events.append(Event(OP, len(trace.ops)))
        name = f"drivetrain::{type(optimizer).__name__}"
        trace.ops.append(OpCall(name, "", "optimizer", False, 0.0, moved, "float32", (), (), -1))
        return loss

    plain, steps.step = steps.step, step
    try:
        yield
    finally:
        steps.step = plain


def without_copies(trace: StepTrace, accumulations: dict[int, tuple[int, ...]]) -> list[Event]:
    """Corrects the events for memory that autograd reuses.

    Autograd adds up gradients in place of one that nothing else refers to, and takes a parameter's first gradient
    without a copy. It does neither for tensors without values. The trace then has an operation with a new block there,
    after which an operand of the same size is freed. The new block then continues that operand's.
    """
    events = trace.events
    freed_soon: dict[int, int] = {}  # the event that frees a reused operand, by the event that allocates the result
    for position, event in enumerate(events):
        if event.kind != OP or event.subject not in accumulations:
            continue
        if position + 1 >= len(events) or events[position + 1].kind != ALLOC:
            continue
        made = trace.blocks[events[position + 1].subject]
        for later in range(position + 2, min(position + 8, len(events))):
            if events[later].kind in (OP, STEP):
                break
            block = events[later].subject
            is_operand = events[later].kind == FREE and block in accumulations[event.subject]
            if is_operand and trace.blocks[block].num_bytes == made.num_bytes:
                freed_soon[position + 1] = later
                break
    same: dict[int, int] = {}

    def origin(block: int) -> int:
        while block in same:
            block = same[block]
        return block

    removed = set(freed_soon.values())
    result = []
    for position, event in enumerate(events):
        if position in freed_soon:
            operand, made_block = events[freed_soon[position]].subject, event.subject
            same[made_block] = origin(operand)
            taken, first = trace.blocks[made_block], trace.blocks[same[made_block]]
            if taken.category == "gradients":
                first.category, first.parameter = taken.category, taken.parameter
        elif position not in removed:
            index = origin(event.subject) if event.kind in (ALLOC, FREE) else event.subject
            result.append(Event(event.kind, index))
    for op in trace.ops:
        op.reads = tuple(dict.fromkeys(map(origin, op.reads)))
        op.writes = tuple(dict.fromkeys(map(origin, op.writes)))
        op.operands = tuple(Operand(origin(operand.block), operand.offset) for operand in op.operands)
        op.results = tuple(map(origin, op.results))
    return result
