"""Draws the fault of a round and its time from the round's seed alone, so that the round can be repeated."""

import random
from dataclasses import dataclass

FAULTS = {
    "kill-forward": "SIGKILL of a rank in forward",
    "kill-backward": "SIGKILL of a rank in backward",
    "kill-reduction": "SIGKILL of a rank inside a reduction",
    "stop": "SIGSTOP of a rank in any of these",
    "full-shm": "/dev/shm is full, or fills up",
    "skip-step": "a rank skips a step, or a backward",
    "extra-parameter": "a rank has one parameter more",
}
LAYERS = 6
FAULTY_STEPS = 8  # the fault comes in one of these
CLEAN_STEPS = 3

# The others notice a dead rank when its connections close, so that the timeout may be long. They notice a stopped rank
# only by the timeout, for which every such round waits.
TIMEOUT_S = 20.0
SHORT_TIMEOUT_S = 2.5
SCALE_TIMEOUT_S = 120.0  # so many ranks share the cores

SCALE = "SIGKILL of one of 64 ranks"
SCALE_RANKS = 64
SCALE_RANKS_PER_HOST = 8
SCALE_STEPS = 50


@dataclass(frozen=True)
class Round:
    """Everything that the ranks of one run must know. A run without a fault is clean."""

    fault: str  # one of FAULTS, or "": none
    seed: int
    transport: str
    ranks: int
    timeout_s: float  # the process group's
    steps: int
    faulty: int = -1  # the rank
    step: int = -1  # in which the fault comes; -1: before the first
    point: str = ""  # where in the step; one of those in training.py
    layer: int = 0  # of the model, where the point is one layer's
    delay_s: float = 0.0  # after the point
    leaves: bool = True  # a rank that has skipped a step ends after its last one; else it lingers
    shm_bytes: int = 0  # size of the /dev/shm that is filled up
    buffers: bool = False  # the model has some, which torch broadcasts in every forward
    find_unused: bool = False
    check_replicas_every: int = 0
    ranks_per_host: int = 0  # this machine's ranks then take themselves for those of several; 0: for one host's


def draw(fault: str, seed: int, transport: str, ranks: int) -> Round:
    """Returns the round of that fault and seed, which is equal at every call and for every transport."""
    rng = random.Random(f"{fault} {seed}")
    point = fault.removeprefix("kill-")
    if fault == "stop":
        point = rng.choice(("forward", "backward", "reduction"))
    if point == "reduction":
        point = rng.choice(("last bucket", "after the last gradient"))
    if fault == "skip-step":
        point = rng.choice(("the step", "the backward"))
    step = rng.randrange(FAULTY_STEPS)
    if fault == "full-shm":
        step = rng.choice((-1, rng.randrange(CLEAN_STEPS)))  # before anything is allocated, or in mid training
    return Round(
        fault,
        seed,
        transport,
        ranks,
        timeout_s=SHORT_TIMEOUT_S if fault in ("stop", "skip-step") else TIMEOUT_S,
        # Takes more steps than fit into any delay. With a full /dev/shm the training must reach a clean run's values.
        steps={"skip-step": step + rng.randint(1, 4), "full-shm": CLEAN_STEPS}.get(fault, 1000),
        faulty=rng.randrange(ranks),
        step=step,
        point=point,
        layer=rng.randrange(LAYERS),
        delay_s=rng.uniform(0, 1e-3),
        leaves=rng.random() < 0.5,
        shm_bytes=rng.choice((1, 16, 256)) * 4096,
        buffers=fault != "full-shm" and rng.random() < 0.3,
        find_unused=rng.random() < 0.3,
        check_replicas_every=rng.choice((0, 0, 1, 3)),
    )


def draw_scale(seed: int) -> Round:
    """Returns the round of many ranks on many hosts. One rank is killed after some steps."""
    rng = random.Random(f"scale {seed}")
    return Round(
        "kill-at-scale",
        seed,
        "shm",
        SCALE_RANKS,
        timeout_s=SCALE_TIMEOUT_S,
        steps=1000,
        faulty=rng.randrange(SCALE_RANKS),
        step=SCALE_STEPS,
        point=rng.choice(("forward", "backward", "last bucket", "after the last gradient")),
        layer=rng.randrange(LAYERS),
        delay_s=rng.uniform(0, 1e-3),
        ranks_per_host=SCALE_RANKS_PER_HOST,
    )


def clean(transport: str, ranks: int) -> Round:
    """Returns a run without a fault."""
    return Round("", 0, transport, ranks, timeout_s=TIMEOUT_S, steps=CLEAN_STEPS)
