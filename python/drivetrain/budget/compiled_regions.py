"""Drives torch's own memory budget for the compiled regions of a model by the bytes that they save for backward."""

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from . import plan, progress, table
from .compiled import Region, drop_compiled, find, new_scope

if TYPE_CHECKING:
    from .trace import Trace

_MAX_RECOMPILATIONS = 5
_NEAR = 0.95  # share of the allowed bytes from which another compilation is not worth its time
_FINEST = 0.02  # smallest step of the ratio


class HigherRatio(NamedTuple):
    """A higher ratio, and the number of regions, from the first on, that have it."""

    ratio: float
    num_regions: int


class CompiledRegions:
    """The outermost compiled parts of a model: modules that torch.compile returned, and modules whose `compile()` was
    called or whose `forward` is compiled.

    From construction to `remove()`, operations inside of the regions are not recorded. The bytes that a region saves
    count, and torch's partitioner decides which these are. `install(ratio)` recompiles the regions with
    `torch._functorch.config.activation_memory_budget` at that ratio. The setting is in force only while these regions
    are compiled, including later recompilations. `remove()` restores the original compiled functions.

    Attributes:
        ratio: the ratio in force; None: the regions are as they were found.
        higher: a higher ratio and the number of regions, from the first on, that have it; None: all have `ratio`.
        measured: the bytes that the regions saved for backward, by the ratio that was tried.
        saved_bytes: the bytes that the regions save now; None before they were measured.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ratio: float | None = None
        self.higher: HigherRatio | None = None
        self.saved_bytes: int | None = None
        self.measured: dict[float, int] = {}
        self._regions: list[Region] = []
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes a second
            self._regions = [Region(module, attribute) for module, attribute in find(model)]
        for region in self._regions:
            region.attach()

    def __len__(self) -> int:
        return len(self._regions)

    def __str__(self) -> str:
        """Describes the ratios in force and the saved bytes."""
        saved = "" if self.saved_bytes is None else f"; they save {table.size(self.saved_bytes)} for backward"
        regions = "1 compiled region" if len(self) == 1 else f"{len(self)} compiled regions"
        if self.ratio is None:
            return f"{regions}, as they were found{saved}"
        ratios = f"{self.ratio:g}"
        if self.higher is not None:
            ratios = f"{self.higher.ratio:g} for the first {self.higher.num_regions} and {self.ratio:g} for the others"
        if self.measured:
            saved += f" ({table.size(max(self.measured.values()))} without a budget)"
        return f"{regions}, compiled at torch's activation_memory_budget {ratios}{saved}"

    def install(self, ratio: float | None, higher: HigherRatio | None = None) -> None:
        """Compiles the regions at the ratio from their next call on.

        Args:
            ratio: The memory budget of torch's partitioner, from 0 to 1; None: restore what was found.
            higher: Another ratio and the number of regions, from the first on, to compile with it.
        """
        self.ratio, self.higher = ratio, higher
        scope = new_scope()
        for index, region in enumerate(self._regions):
            region.set_ratio(higher.ratio if higher is not None and index < higher.num_regions else ratio, scope)
        drop_compiled(lambda backend: not backend.is_in_use)

    def remove(self) -> None:
        """Restores the calls of the model. Safe to call twice."""
        self.install(None)
        for region in self._regions:
            region.detach()
        self._regions = []

    def fit(
        self, trace: "Trace", peak_bytes: int, budget_bytes: int, profile: Callable[[], "tuple[Trace, int]"]
    ) -> "Trace":
        """Finds the largest ratio at which the regions' bytes fit by bisection, and leaves it in force.

        The regions get the same share of the budget that they have of the bytes without a budget. If no tried ratio
        fits that share, they get what the rest of the model leaves when it recomputes as much as possible. The bytes
        change with the ratio in large steps. Therefore, if there are several regions, as many as fit get the next
        higher tried ratio.

        Args:
            trace: The trace of a step with the regions as they were found.
            peak_bytes: The peak of that step.
            budget_bytes: The budget for the whole model.
            profile: Profiles the step. Called at most 6 times, with one recompilation each.

        Returns:
            The trace of the step at the chosen ratio.

        Raises:
            ValueError: No ratio makes the budget possible. The message names the smallest possible budget.
        """
        if not self._regions or budget_bytes >= peak_bytes:
            return trace
        from torch._functorch import config

        high, low = float(config.activation_memory_budget), 0.0
        own_bytes = _unseen_bytes(trace)
        if own_bytes == 0:
            return trace
        self.measured = {high: own_bytes}
        share_bytes = math.floor(budget_bytes * own_bytes / max(peak_bytes, own_bytes))
        smallest_bytes = plan.choose(trace, budget_bytes).smallest_bytes
        fitting: dict[float, Trace] = {}
        possible: dict[float, Trace] = {high: trace} if smallest_bytes <= budget_bytes else {}
        ratio = round(high * share_bytes / own_bytes, 4)
        for count in range(1, _MAX_RECOMPILATIONS + 1):
            progress.tell(f"compiles at memory budget {ratio:.3f} ({count} of at most {_MAX_RECOMPILATIONS})")
            self.install(ratio)
            tried, _ = profile()
            self.measured[ratio] = own_bytes = _unseen_bytes(tried)
            smallest = plan.choose(tried, budget_bytes).smallest_bytes
            smallest_bytes = min(smallest_bytes, smallest)
            if smallest <= budget_bytes:
                possible[ratio] = tried
            if ratio in possible and own_bytes <= share_bytes:
                fitting[ratio] = tried
                low = ratio
            else:
                high = ratio
            if (fitting and own_bytes <= share_bytes and own_bytes >= _NEAR * share_bytes) or ratio == 0.0:
                break
            is_last = count == _MAX_RECOMPILATIONS - 1
            ratio = 0.0 if not fitting and (is_last or high < 2 * _FINEST) else round((low + high) / 2, 4)
            if high - low < _FINEST and fitting:
                break
        found = fitting or possible
        if not found:
            self.install(None)
            raise ValueError(
                f"budget is {table.size(budget_bytes)}: the smallest that is possible with this step is "
                f"{table.size(smallest_bytes)} ({table.size(peak_bytes)} without a budget); its compiled regions save "
                + ", ".join(
                    f"{table.size(num_bytes)} at {tried:.3f}" for tried, num_bytes in sorted(self.measured.items())
                )
            )
        best = max(found)
        if best in fitting:
            mixed = self._fit_mixed(best, share_bytes, budget_bytes, profile)
            if mixed is not None:
                return mixed
        self.saved_bytes = self.measured[best]
        if best != self.ratio or self.higher is not None:
            self.install(best if found[best] is not trace else None)
        return found[best]

    def _fit_mixed(
        self, ratio: float, share_bytes: int, budget_bytes: int, profile: Callable[[], "tuple[Trace, int]"]
    ) -> "Trace | None":
        """Compiles as many regions as fit at the next higher tried ratio, and returns the trace of the step.

        Estimates the number of regions as if all saved the same bytes, then measures. Returns None if that does not
        fit, or would not gain enough."""
        if self.measured[ratio] >= _NEAR * share_bytes:
            return None
        above = min(tried for tried in self.measured if tried > ratio)
        bytes_per_region = (self.measured[above] - self.measured[ratio]) / len(self._regions)
        count = int((share_bytes - self.measured[ratio]) / max(bytes_per_region, 1.0))
        if not 0 < count < len(self._regions):
            return None
        progress.tell(f"compiles {count} regions at memory budget {above:.3f}, others at {ratio:.3f}")
        self.install(ratio, HigherRatio(above, count))
        mixed, _ = profile()
        saved_bytes = _unseen_bytes(mixed)
        if saved_bytes > share_bytes or plan.choose(mixed, budget_bytes).smallest_bytes > budget_bytes:
            return None
        self.saved_bytes = saved_bytes
        return mixed

    def to_dict(self) -> dict[str, Any]:
        measured = [list(pair) for pair in sorted(self.measured.items())]
        return {
            "ratio": self.ratio,
            "higher": None if self.higher is None else list(self.higher),
            "saved_bytes": self.saved_bytes,
            "measured": measured,
        }

    @classmethod
    def restored(cls, model: nn.Module, plain: dict[str, Any] | None) -> "CompiledRegions":
        """Finds the regions of a model, and puts the result of `to_dict` in force.

        Raises:
            ValueError: The result has a ratio for compiled regions, and the model has none.
        """
        regions = cls(model)
        if plain is not None and plain["ratio"] is not None:
            if not regions:
                raise ValueError(
                    "plan was made for a model with compiled regions, and this model has none: compile the model "
                    "before it gets the plan"
                )
            regions.measured = dict(plain["measured"])
            regions.saved_bytes = plain.get("saved_bytes")
            higher = plain.get("higher")
            regions.install(plain["ratio"], None if higher is None else HigherRatio(*higher))
        return regions


def _unseen_bytes(trace: "Trace") -> int:
    """Sums the saved values that no recorded operation made: values of compiled regions, and the inputs of the step."""
    saved = {use.value for use in trace.uses}
    total = 0
    for begin, one in trace.passes_at():
        made = one.made
        total += sum(v.num_bytes for i, v in enumerate(one.values) if begin + i in saved and i not in made)
    return total
