"""Tests that random scripts train with our optimizers as with torch's classes, operation after operation.

Hypothesis draws sequences of what scripts do (`random_scripts.Side`) and shrinks one that fails. Three sides run each
sequence: torch's class, ours, and ours with a look at all gradients and states after each operation. Ours agree to the
bit. torch's agrees within the tolerance of steps that round differently (docs/limitations.md), or raises as well.

`WHOLE=1` draws 10,000 sequences, and `SCRIPTS=100` draws 100. Each run prints its seed; `SEED=...` repeats it.
"""

import copy
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor

from drivetrain import optim
from effort import SEED, rounds
from optim_cases import TORCHS
from optim_db_cases import INFOS, MUON
from random_scripts import GRADIENTS, HOOKS, LOOKS, PARAMETERS, STATES, WAYS, Side

SEQUENCES = int(os.environ.get("SCRIPTS", rounds(20, 5_000)))  # each for constructed and for installed classes
OPERATIONS_PER_SEQUENCE = 25
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-6, 1e-8)}  # torch rounds with a learning rate of float32
MUON_TOLERANCE = (0.1, 0.05)  # Newton-Schulz iterations round to bfloat16
# The docstring of step() declares these types of ours, after torch's.
DECLARED = [(KeyError, ValueError), (KeyError, TypeError), (RuntimeError, TypeError), (RuntimeError, ValueError)]
DECLARED += [(ValueError, RuntimeError)]
SHAPES: list[list[Any]] = [[(3, 2)], [(3, 2), (4,), ()], [(5, 7), (0,), (1,), (3, 2), (3, 2)], [(2,)] * 60]
NAMES = sorted(INFOS.keys() | {"Muon"})
OPTIONS = {
    name: [entry.kwargs for entry in ({**INFOS, "Muon": MUON}[name]).optim_inputs_func(device="cpu")] for name in NAMES
}

SETTINGS: list[tuple[str, Any]] = [
    *(("lr", 0.01), ("lr", 0.02), ("weight_decay", 0.0), ("weight_decay", 0.1), ("eps", 1e-3)),
    *(("maximize", True), ("maximize", False), ("foreach", None)),
    *(("initial_lr", 0.01), ("initial_lr", "absent"), ("script's own", None), ("script's own", "absent")),
]
NUMBERS, FLAGS = range(10), (False, True)
OPERATIONS: dict[str, dict[str, Any]] = {  # what each argument is drawn from
    "gradients": {"kind": GRADIENTS, "seed": NUMBERS, "every": [1, 1, 2, 3]},
    "backward": {"seed": NUMBERS},
    "forward": {"seed": NUMBERS},
    "zero_grad": {"to_none": FLAGS, "by_hand": FLAGS},
    "clip_norm": {"most": [0.1, 1.0, 1e3], "kind": [2.0, 2.0, float("inf"), 1.0]},
    "clip_value": {"most": [0.1, 1.0]},
    "keep": {"what": ["grad", "part of grad", "state", "nothing"], "index": NUMBERS},
    "step": {"where": ["here"] * 20 + ["thread", "thread", "child"]},
    "step_with_closure": {"seed": NUMBERS},
    "scaled_backward": {"seed": NUMBERS},
    "unscale": {},
    "scaler_step": {},
    "scaler_update": {},
    "scaled_iteration": {"seed": NUMBERS, "clips": FLAGS, "zeroes": FLAGS},
    "setting": {"setting": SETTINGS, "index": NUMBERS},
    "tensor_lr": {"value": [0.01, 0.02], "index": NUMBERS, "in_place": FLAGS},
    "add_group": {"seed": NUMBERS, "lr": [0.01, 0.02]},
    "remove_parameter": {"forgets": FLAGS},
    "states": {"what": STATES, "way": WAYS, "index": NUMBERS, "entry": NUMBERS},
    "parameter": {"what": PARAMETERS, "index": NUMBERS, "seed": NUMBERS},
    "copied": {"how": ["deepcopy", "pickle"]},
    "hook": {"kind": HOOKS},
    "schedule": {},
    "look": {"how": LOOKS},
}

EDITS = ("states", "parameter", "keep", "setting", "add_group", "remove_parameter", "copied")


class Scripts(RuleBasedStateMachine):
    """Runs each drawn operation on all sides, and compares what they returned or raised, and their parameters."""

    is_installed = False
    sides: list[Side]

    @initialize(
        name=st.sampled_from(NAMES),
        index=st.sampled_from(NUMBERS),
        shapes=st.sampled_from(SHAPES),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def begin(self, name: str, index: int, shapes: list[Any], dtype: torch.dtype) -> None:
        options = OPTIONS[name][index % len(OPTIONS[name])]
        if name == "Muon":
            shapes = [shape for shape in shapes if len(shape) == 2] or [(3, 2)]
        if name == "Adafactor":  # torch's divides by the number of elements
            shapes = [shape for shape in shapes if shape != (0,)]
        self.tolerances = dict.fromkeys(TOLERANCES, MUON_TOLERANCE) if name == "Muon" else TOLERANCES
        self.setting = (name, options, shapes, dtype)
        self.start()

    def start(self) -> None:
        name, options, shapes, dtype = self.setting
        ours = getattr(optim, name)
        self.sides = [Side(cls, cls is not ours, options, shapes, dtype) for cls in (TORCHS[name], ours, ours)]

    def run(self, operation: str, arguments: dict[str, Any]) -> None:
        self.compare([side.do(operation, arguments) for side in self.sides], operation)

    def compare(self, outcomes: list[Any], operation: str) -> None:
        theirs, ours, looked = outcomes
        if any(isinstance(outcome, Exception) for outcome in outcomes):
            kinds = [type(outcome) for outcome in outcomes]
            assert kinds[1] is kinds[2], f"{operation}: ours raised {ours!r}, and after looks {looked!r}"
            assert self.may_raise(theirs, ours), f"{operation}: torch's gives {theirs!r}, and ours {ours!r}"
            self.start()  # torch's step may have changed some parameters before it raised
            return
        for how in LOOKS:
            self.sides[2].do("look", {"how": how})
        found = [{"result": outcome, **side.values()} for outcome, side in zip(outcomes, self.sides, strict=True)]
        found[2]["log"] = found[1]["log"]  # looks run hooks
        self.assert_alike(found[2], found[1], True, f"{operation}, after looks")
        self.assert_alike(found[1], found[0], False, operation)

    def may_raise(self, theirs: Any, ours: Any) -> bool:
        if "expected dtype" in str(
            theirs
        ):  # torch's lerp_() refuses states that a script has cast, and ours reads them
            return not isinstance(ours, Exception)
        if isinstance(theirs, AssertionError) and not isinstance(ours, Exception):
            return True  # torch's Adafactor asserts after a matrix has become a vector
        kinds = type(theirs), type(ours)
        return kinds[0] is kinds[1] or (not self.is_installed and kinds in DECLARED)

    def assert_alike(self, ours: Any, theirs: Any, is_exact: bool, where: str) -> None:
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            rtol, atol = (0.0, 0.0) if is_exact else self.tolerances.get(ours.dtype, (0.0, 0.0))
            options = {"rtol": rtol, "atol": atol, "equal_nan": True, "check_dtype": is_exact}  # loads keep our dtypes
            if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
                return
            torch.testing.assert_close(ours, theirs, **options, msg=lambda m: f"{where}: {m}")
        elif isinstance(ours, dict) and isinstance(theirs, dict):
            assert ours.keys() == theirs.keys(), where
            for key in ours:
                self.assert_alike(ours[key], theirs[key], is_exact, f"{where}, {key}")
        elif isinstance(ours, list | tuple):
            assert len(ours) == len(theirs), where
            for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                self.assert_alike(mine, other, is_exact, f"{where}, {place}")
        elif isinstance(ours, float) and isinstance(theirs, float):
            assert ours == pytest.approx(theirs, nan_ok=True), where
        else:
            assert type(ours) is type(theirs), where
            assert ours == theirs, where

    @rule(through_file=st.booleans(), into_fresh=st.booleans(), crosses=st.booleans())
    def save_and_load(self, through_file: bool, into_fresh: bool, crosses: bool) -> None:
        """Loads each side's state dict, or each the other's."""
        saved = [side.do("saved", {"through_file": through_file}) for side in self.sides]
        if any(isinstance(each, Exception) for each in saved):
            self.compare(saved, "saved")
            return
        if crosses:
            saved = [saved[1], saved[0], copy.deepcopy(saved[0])]
        arguments = [{"saved": each, "into_fresh": into_fresh} for each in saved]
        self.compare([side.do("load", each) for side, each in zip(self.sides, arguments, strict=True)], "load")

    def teardown(self) -> None:
        if hasattr(self, "sides"):
            for how in LOOKS:
                self.run("look", {"how": how})


def _rule_of(operation: str, choices: dict[str, Any], *, steps: bool = False) -> Any:
    def run(self: Scripts, **drawn: Any) -> None:
        self.run(operation, drawn)
        if steps:
            self.run("gradients", {"kind": "new", "seed": 1, "every": 1})
            self.run("step", {"where": "here"})

    run.__name__ = operation
    return rule(**{name: st.sampled_from(choice) for name, choice in choices.items()})(run)


class Constructed(Scripts):
    """Draws scripts that name drivetrain's classes."""

    locals().update({f"do_{operation}": _rule_of(operation, each) for operation, each in OPERATIONS.items()})


class Installed(Constructed):
    """Draws scripts that name torch's classes, in whose place drivetrain's are."""

    is_installed = True


class Edited(Scripts):
    """Draws edits of states, groups and parameters, with a step after each. `tests/sanitize.sh` runs them."""

    locals().update({f"do_{operation}": _rule_of(operation, OPERATIONS[operation], steps=True) for operation in EDITS})


def run(machine: type[Scripts], sequences: int = SEQUENCES) -> None:
    run_state_machine_as_test(
        seeded(SEED)(machine),
        settings=settings(
            max_examples=sequences,
            stateful_step_count=OPERATIONS_PER_SEQUENCE,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_scripts_that_name_our_classes() -> None:
    run(Constructed)


@pytest.mark.usefixtures("installed")
def test_scripts_that_name_torchs_classes() -> None:
    run(Installed)


def test_edits_between_steps() -> None:
    run(Edited, rounds(8, whole=400))
