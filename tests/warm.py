"""Processes that start by forking one that has imported torch already: in milliseconds instead of seconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext

# torch._dynamo: torch's optimizers import it when they are first used, for more than a second.
IMPORTED = ["torch", "torch._dynamo", "torch.distributed", "drivetrain", "pytest"]


def warm_context() -> ForkServerContext:
    """The context whose processes fork from that one; it starts with the first of them, and ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
