"""Drives the wrapper and torch's class through drawn sequences of what scripts do, and compares all bits after each.

The seed is printed. `SEED` repeats it, and `WHOLE=1` draws 10,000 sequences.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from script_actions import Action, play

from effort import SEED, rounds

OnRanks = Callable[..., list[Any]]
numbers, indices, factors = st.integers(0, 3), st.integers(0, 8), st.sampled_from([0.5, 2.0, -1.0])
copies = st.sampled_from(["deepcopy", "pickle", "average", "file"])
ACTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "step": {"seed": numbers, "use_optional": st.sampled_from([True, True, False]), "syncs": st.booleans()},
    "step_in_a_thread": {"seed": numbers},
    "forwards_then_backward": {"seed": numbers},
    "backward_twice": {"seed": numbers},
    "zero_grad": {"set_to_none": st.booleans()},
    "optimizer_step": {},
    "clip": {"limit": st.sampled_from([1e-3, 1.0, 1e3])},
    "set_grad": {
        "index": indices,
        "how": st.sampled_from(["none", "new", "held", "data", "half", "in place", "through data"]),
    },
    "keep": {"index": indices, "how": st.sampled_from(["itself", "flat", "detached", "data"])},
    "evaluate": {"seed": numbers, "records": st.booleans()},
    "copy_on": {"rank": st.integers(0, 1), "how": copies},
    "train_the_copy": {"how": st.sampled_from(["deepcopy", "pickle", "file"])},
    "load": {"factor": factors},
    "tensor_hook": {"index": indices, "factor": factors},
    "module_hook": {"factor": factors},
    "comm_hook": {"compresses": st.booleans()},
    "freeze": {"index": indices, "requires_grad": st.booleans()},
    "set_buffer": {"value": st.sampled_from([0.0, 1.0])},
    "join": {"seed": numbers, "more": st.integers(0, 2), "divides": st.booleans()},
}
actions: st.SearchStrategy[list[Action]] = st.lists(
    st.one_of([st.tuples(st.just(name), st.fixed_dictionaries(given)) for name, given in ACTIONS.items()]),
    min_size=2,
    max_size=10,
)
# After this, ranks have different gradients.
JOIN = {"seed": 0, "more": 1, "divides": False}
VIEWS = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
UNUSED = {"seed": 0, "use_optional": False, "syncs": True}
options = st.fixed_dictionaries(
    {
        "find_unused_parameters": st.booleans(),
        "gradient_as_bucket_view": st.booleans(),
        "bucket_cap_mb": st.sampled_from([None, 0.0001]),
        "init_sync": st.booleans(),
    },
    optional={"static_graph": st.just(True)},
)


def test_drawn_scripts_give_torchs_bits(on_ranks: OnRanks) -> None:
    print(f"SEED={SEED}")

    @seed(SEED)
    @settings(
        max_examples=rounds(60, 10_000),
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(options, actions)
    @example(VIEWS, [("join", JOIN), ("step", UNUSED)])
    def follow(options: dict[str, Any], actions: list[Action]) -> None:
        found = on_ranks(play, options, actions)
        assert found == [None, None], f"SEED={SEED}: {found}"

    follow()
