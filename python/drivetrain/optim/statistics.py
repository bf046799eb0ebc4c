"""Measures gradients, updates and rounding in the step that reads them anyway: `optimizer.statistics()`."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from .. import _C
from ..notebook import html_table, text_table
from .engine import Engine, is_capturing
from .kept import NAME, Kept
from .rule import Group

_DECAY = 0.98  # of the averages that the noise scale is computed from, per step that measures it
_LOST = 0.5  # share of lost updates from which on advice names a parameter
_NORMS = ("grad_norm", "update_norm", "param_norm")
_COUNTS = ("num_not_finite", "num_changed", "num_lost")
_HEADER = ("parameter", "gradient", "update", "value", "update/value", "largest gradient", "not finite", "lost")

# The native step's tuple: a parameter, what has measured it, and its index there.
Record = tuple[Tensor, _C.Measured, int]
# That without the parameter, and the factor that multiplies the gradient's norms.
_Taken = tuple[_C.Measured, int, float | Tensor]
# A reducer's step, its ranks, and squared norms [2]: of the ranks' gradients, summed over ranks, and of their mean.
_Norms = tuple[int, int, Tensor]


@dataclass(frozen=True)
class ParameterStatistics:
    """Figures of one parameter in one step, or of several together. Norms are 2-norms.

    Attributes:
        grad_norm: Norm of the gradient, unscaled and before the step clips it.
        update_norm: Norm of the change that the step computes, before it is rounded to the parameter's format.
        param_norm: Norm of the values before the step, including the bits of a master.
        largest_grad: Largest magnitude among the gradient's finite elements, unscaled.
        num_not_finite: Elements of the gradient that are infinite or NaN.
        num_changed: Elements that the computed update changes, where storing them may round to nearest.
        num_lost: Elements of `num_changed` whose stored value stays as it was.
    """

    grad_norm: float
    update_norm: float
    param_norm: float
    largest_grad: float
    num_not_finite: int
    num_changed: int
    num_lost: int

    @property
    def relative_update(self) -> float:
        """The update's norm divided by the values' norm; infinite for values of zero."""
        return self.update_norm / self.param_norm if self.param_norm else math.inf

    @property
    def lost_updates(self) -> float:
        """Share of the updates that rounding loses, 0 to 1.

        It is 0 for formats as wide as the arithmetic, and for stochastic rounding, which loses nothing on average.
        """
        return self.num_lost / self.num_changed if self.num_changed else 0.0


def _together(found: Sequence[ParameterStatistics]) -> ParameterStatistics:
    """Returns the figures of several parameters together."""
    figures: dict[str, Any] = {name: math.hypot(*(getattr(one, name) for one in found)) for name in _NORMS}
    figures |= {name: sum(getattr(one, name) for one in found) for name in _COUNTS}
    return ParameterStatistics(**figures, largest_grad=max(one.largest_grad for one in found))


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale, from moving averages over the steps that have measured it.

    Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1. The unit of batches is
    one rank's batch of one step; multiply by its number of samples for samples.

    Attributes:
        ranks: Number of ranks, which is the batch of a step.
        squares: Estimate of the squared norm of the true gradient.
        variance: Estimate of the trace of the covariance of one rank's gradient.
        num_steps: Steps that were measured. Each one counts for 2 % less than the next.
    """

    ranks: int
    squares: float
    variance: float
    num_steps: int

    @property
    def scale(self) -> float:
        """The noise scale in batches of one rank; infinite where noise hides the gradient, NaN before any is known."""
        if self.squares > 0:
            return max(self.variance, 0.0) / self.squares
        return math.inf if self.variance > 0 else math.nan

    def advice(self) -> str:
        """Returns a sentence on the batch size that the noise scale suggests."""
        ratio = self.scale / self.ranks
        measured = f"the gradient noise scale is {ratio:.2g} times the batch of a step ({self.num_steps} steps)"
        if not math.isfinite(ratio):
            return f"noise hides the gradient in {self.num_steps} steps: measure more of them"
        if ratio > 2:
            return f"{measured}: a batch up to that much larger needs almost as many fewer steps"
        if ratio < 0.5:
            return f"{measured}: a smaller batch needs almost as few steps, and fewer samples"
        return f"{measured}: the batch balances steps and samples"


@dataclass
class _Pending:
    """The figures of a step, perhaps on their way to the host."""

    step: int
    taken: dict[str, _Taken]
    norms: _Norms | None  # on the host once the figures are

    @property
    def has_arrived(self) -> bool:
        return all(one.has_arrived for one in self._measured())

    @property
    def was_skipped(self) -> bool:
        return any(one.skipped for one in self._measured())

    def _measured(self) -> set[_C.Measured]:
        return {measured for measured, *_ in self.taken.values()}


class _Noise:
    """Averages the norms of gradients that a reducer measures before and after their reduction."""

    def __init__(self, every: int, model: Any) -> None:
        self._model, self._last = model, 0
        self._gradient = self._variance = self._weight = 0.0
        self._num_steps = 0
        model.reducer.set_noise_every(every)

    def look(self) -> _Norms | None:
        """Returns the norms of the last step that measured, perhaps on their way to the host; None before it."""
        found = self._model.reducer.gradient_noise()
        if found is None or found[1] == 1:
            return None
        step, ranks, squares = found
        return step, ranks, squares.to("cpu", non_blocking=True)

    def add(self, norms: _Norms | None) -> NoiseScale | None:
        """Adds norms that are newer than the last ones. Returns the estimate; None before the first ones."""
        if norms is None:
            return None
        step, ranks, squares = norms
        of_rank, of_mean = squares[0].item() / ranks, squares[1].item()
        if step != self._last and math.isfinite(of_rank) and math.isfinite(of_mean):
            self._last, self._num_steps = step, self._num_steps + 1
            self._weight = _DECAY * self._weight + 1
            self._gradient = _DECAY * self._gradient + (ranks * of_mean - of_rank) / (ranks - 1)
            self._variance = _DECAY * self._variance + (of_rank - of_mean) * ranks / (ranks - 1)
        if not self._num_steps:
            return None
        return NoiseScale(ranks, self._gradient / self._weight, self._variance / self._weight, self._num_steps)

    def end(self) -> None:
        """Ends measuring."""
        self._model.reducer.set_noise_every(0)


@dataclass(frozen=True, repr=False)
class StepStatistics:
    """Figures of one step; `print()` shows them with advice.

    Attributes:
        step: Number of the step, from 1, counted since `optimizer.statistics()` was called.
        parameters: By name. Parameters without a gradient, or without elements, are not in it.
        noise: The gradient noise scale up to this step; None where it is not measured.
    """

    step: int
    parameters: dict[str, ParameterStatistics] = field(default_factory=dict)
    noise: NoiseScale | None = None

    def of(self, pattern: str = "*") -> ParameterStatistics:
        """Returns the figures of all parameters together whose names match a pattern.

        Args:
            pattern: A shell pattern, such as "*.mlp.*".

        Raises:
            KeyError: No name matches.
        """
        found = [one for name, one in self.parameters.items() if fnmatchcase(name, pattern)]
        if not found:
            raise KeyError(f"no parameter of the step matches {pattern!r}")
        return _together(found)

    def by_depth(self) -> dict[int, ParameterStatistics]:
        """Returns the figures of each layer, by the first number in its parameters' names, as in "h.3.mlp.weight"."""
        layers: dict[int, list[ParameterStatistics]] = {}
        for name, one in self.parameters.items():
            if found := re.search(r"(?:^|\.)(\d+)(?:\.|$)", name):
                layers.setdefault(int(found[1]), []).append(one)
        return {depth: _together(layers[depth]) for depth in sorted(layers)}

    def advice(self) -> list[str]:
        """Returns one sentence with cause and remedy for each finding; none if there is none."""
        lost = {name: one.lost_updates for name, one in self.parameters.items() if one.lost_updates > _LOST}
        found = []
        if lost:
            worst = sorted(lost, key=lambda name: -lost[name])
            names = ", ".join(f"{name!r} {lost[name]:.0%}" for name in worst[:3]) + (", ..." if len(worst) > 3 else "")
            found.append(
                f"rounding loses over half of the updates of {len(lost)} parameters ({names}): master_bits=32 or "
                "rounding='stochastic' keeps them, and master_bits=24 or rounding='kahan' most"
            )
        broken = [name for name, one in self.parameters.items() if one.num_not_finite]
        if broken:
            found.append(f"{len(broken)} gradients are not finite, the first one of {broken[0]!r}")
        if self.noise is not None:
            found.append(self.noise.advice())
        return found

    def fields(self) -> dict[str, Any]:
        """Returns the figures as fields of an event of the monitor; "nan" and "inf" are strings."""

        def plain(figures: dict[str, Any]) -> dict[str, Any]:
            return {name: value if math.isfinite(value) else str(value) for name, value in figures.items()}

        def of_parameter(one: ParameterStatistics) -> dict[str, Any]:
            return plain(vars(one) | {"relative_update": one.relative_update, "lost_updates": one.lost_updates})

        return {
            "noise": None if self.noise is None else plain(vars(self.noise) | {"scale": self.noise.scale}),
            "all": of_parameter(self.of()),
            "parameters": {name: of_parameter(one) for name, one in self.parameters.items()},
            "depths": {str(depth): of_parameter(one) for depth, one in self.by_depth().items()},
        }

    def _rows(self) -> list[tuple[str, ...]]:
        whole = {"all": self.of()} if self.parameters else {}
        return [
            (
                name,
                *(f"{x:.3g}" for x in (one.grad_norm, one.update_norm, one.param_norm, one.relative_update)),
                f"{one.largest_grad:.3g}",
                f"{one.num_not_finite}",
                f"{one.lost_updates:.1%}",
            )
            for name, one in (whole | self.parameters).items()
        ]

    def __repr__(self) -> str:
        return "\n".join([f"step {self.step}", text_table(_HEADER, self._rows()), *self.advice()])

    def _repr_html_(self) -> str:
        return html_table([f"step {self.step}", *self.advice()], _HEADER, self._rows())


class Statistics:
    """Measures every so many steps of an optimizer, until remove(); `optimizer.statistics()` returns it.

    Attributes:
        every: Steps from one that measures to the next.
        num_steps: Steps since `optimizer.statistics()` was called.
    """

    def __init__(self, kept: Kept, every: int, model: nn.Module | None) -> None:
        self.every = every
        self._latest: StepStatistics | None = None
        self._kept = kept
        is_ddp = isinstance(getattr(model, "reducer", None), _C.Reducer)
        named = getattr(model, "module", None) if is_ddp else model
        self._names = {} if named is None else {param: name for name, param in named.named_parameters()}
        self._noise = _Noise(every, model) if is_ddp else None
        self.num_steps = 0
        self._taken: dict[str, _Taken] = {}  # of the step in progress
        self._norms: _Norms | None = None  # likewise
        self._pending: deque[_Pending] = deque()  # of earlier steps

    @property
    def latest(self) -> StepStatistics | None:
        """The figures of the last step that measured; None before it. On CUDA the host waits for that step."""
        self._settle(waits=True)
        return self._latest

    @property
    def arrived(self) -> StepStatistics | None:
        """`latest`, or the figures before it while a GPU still computes them. The host does not wait."""
        self._settle(waits=False)
        return self._latest

    @property
    def is_due(self) -> bool:
        """True if the next step measures."""
        return self.num_steps % self.every == 0

    def begin_step(self, groups: Sequence[Group]) -> list[str]:
        """Begins a step that measures. The norms of its backward leave first, so that they arrive with the figures.

        Returns:
            The parameters' names: the model's, the groups', or the positions in param_groups.
        """
        self._norms = None if self._noise is None else self._noise.look()
        return [
            self._names.get(param)
            or (group["param_names"][place] if "param_names" in group else f"param_groups[{index}] {place}")
            for index, group in enumerate(groups)
            for place, param in enumerate(group["params"])
        ]

    def take(
        self, names: Iterable[str], params: Iterable[Tensor], records: Sequence[Record], clip: float | Tensor = 1
    ) -> None:
        """Takes what a native step measures of some parameters. `clip` multiplies their gradients' norms."""
        by_param = {id(param): (measured, index, clip) for param, measured, index in records}
        for name, param in zip(names, params, strict=True):
            if (found := by_param.get(id(param))) is not None:
                self._taken[name] = found

    def end_step(self) -> None:
        """Ends a step that was made; what it has measured becomes `latest`, unless only the device has skipped it."""
        self.num_steps += 1
        if self._taken:
            self._pending.append(_Pending(self.num_steps, self._taken, self._norms))
            self._taken, self._norms = {}, None
            self._settle(waits=False)  # bounds what is pending

    def _settle(self, waits: bool) -> None:
        # A wait or a query would end a capture with an error.
        while self._pending and not is_capturing() and (waits or self._pending[0].has_arrived):
            one = self._pending.popleft()
            if one.was_skipped:
                continue
            params = {}
            for name, (measured, index, clip) in one.taken.items():
                grad_norm, update_norm, param_norm, largest, *counts = measured.record(index)
                grad_norm, largest = grad_norm * float(clip), largest * float(clip)
                params[name] = ParameterStatistics(grad_norm, update_norm, param_norm, largest, *counts)
            noise = None if self._noise is None else self._noise.add(one.norms)
            self._latest = StepStatistics(one.step, params, noise)

    def __getstate__(self) -> dict[str, Any]:
        self._settle(waits=True)
        return self.__dict__

    def remove(self) -> None:
        """Ends measuring. `latest` stays. A second call has no effect."""
        if self._kept.statistics is self:
            self._settle(waits=True)
            self._kept.statistics = None
            if self._noise is not None:
                self._noise.end()

    def __enter__(self) -> Statistics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"nothing measured yet, every={self.every}" if self.latest is None else repr(self.latest)

    def _repr_html_(self) -> str | None:
        return None if self.latest is None else self.latest._repr_html_()


def begin(engine: Engine, every: int, model: nn.Module | None) -> Statistics:
    """Lets the optimizer measure every so many of its steps."""
    kept = engine.kept
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}, expected a number of steps, 1 or above")
    if kept.statistics is not None:
        raise RuntimeError("statistics() was called before: call remove() on what it returned first.")
    if kept.steps_as_torch:
        raise NotImplementedError(
            f"statistics() measures drivetrain's steps, and torch's own {engine.class_name} steps this optimizer's "
            f"parameters: {kept.steps_as_torch}"
        )
    check_devices(engine)
    found = kept.statistics = Statistics(kept, every, model)
    return found


def check_devices(engine: Engine) -> None:
    """Raises NotImplementedError if parameters are on a device whose steps do not measure."""
    devices = {param.device.type for param in engine.params()} - {"cpu"}
    why = ""
    if devices - {"cuda"}:
        why = f"steps on the CPU and CUDA, and parameters are on {min(devices - {'cuda'})}"
    elif devices and engine.kept.offload is not None:
        why = "no steps of offload='cpu'"
    elif devices and engine.class_name == "Muon":
        why = "Muon's steps on the CPU only"
    if why:
        raise NotImplementedError(f"statistics() measures {why}: leave it out there.")


def arrived_statistics(optimizer: object, waits: bool = False) -> tuple[StepStatistics, int] | None:
    """Returns the figures of the last step that measured and has ended, and the number of steps since it.

    None where statistics() is not active, and before such a step. waits: takes the last step that measured.
    """
    kept: Kept | None = getattr(optimizer, NAME, None)
    if kept is None or (statistics := kept.statistics) is None:
        return None
    found = statistics.latest if waits else statistics.arrived
    return None if found is None else (found, statistics.num_steps - found.step)
