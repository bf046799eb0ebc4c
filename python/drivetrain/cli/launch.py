"""Checks the launcher's environment variables and the connection to rank 0 for `drivetrain doctor`.

Every wait has a limit.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import torch

from drivetrain.cli.finding import Finding, fail, not_applicable, passed, warn

LAUNCH_CURE = "start with torchrun, or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process"
_CONNECT_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """Holds the checked values of the launcher's environment variables."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    agent_store: bool  # True: torchrun's agent already listens at the address; False: rank 0 will listen

    @property
    def master(self) -> str:
        """Address and port of the store."""
        return joined(self.master_addr, self.master_port)

    def answers(self) -> bool:
        """Checks whether a process listens at the address now."""
        try:
            socket.create_connection((self.master_addr, self.master_port), _CONNECT_S).close()
        except OSError:
            return False
        return True


def joined(address: str, port: int) -> str:
    """Returns an address and a port as one text. An IPv6 address stands in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def within(seconds: float, call: Callable[[], T]) -> T:
    """Runs a call in a thread and stops waiting for it after a time limit.

    Args:
        seconds: The time limit.
        call: The function to run.

    Returns:
        The result of the call.

    Raises:
        TimeoutError: The call took longer. Its daemon thread keeps running and does not keep the process alive.
        Exception: The exception that the call raised.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # else the caller would wait for the whole limit
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no result after {seconds:g} s")
    return future.result()


def first_line(error: BaseException) -> str:
    """Returns an error's message without the native stack that torch appends."""
    return str(error).partition("\n")[0] or type(error).__name__


def read_launch(environ: Mapping[str, str], timeout_s: float) -> tuple[Launch | None, list[Finding]]:
    """Checks the launcher's variables and the connection to rank 0.

    Args:
        environ: The environment variables.
        timeout_s: Limit in seconds for each network operation.

    Returns:
        The launch and the findings. The launch is None unless it has several ranks and all checks passed.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None, [not_applicable("launch", "RANK and WORLD_SIZE are unset: one process without a launcher")]
    try:
        launch, text = _parse(environ)
    except ValueError as error:
        return None, [fail("launch", str(error), LAUNCH_CURE)]
    findings = [passed("launch", text), _check_master(launch, timeout_s)]
    meets = launch.world_size > 1 and findings[-1].status != "FAIL"
    return launch if meets else None, findings


def _parse(environ: Mapping[str, str]) -> tuple[Launch, str]:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    text = f"rank {rank} of {world_size}"
    if "LOCAL_RANK" in environ:
        local_rank = _number(environ, "LOCAL_RANK")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else world_size
        if not 0 <= local_rank < gpus:
            raise ValueError(f"LOCAL_RANK={local_rank} is not below {gpus}, the number of visible GPUs or of all ranks")
        text += f", local rank {local_rank}"
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT={port} is not between 1 and 65535")
    if not environ.get("MASTER_ADDR"):
        raise ValueError("MASTER_ADDR is unset")
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return Launch(rank, world_size, environ["MASTER_ADDR"], port, agent_store), text


def _number(environ: Mapping[str, str], name: str) -> int:
    if not (text := environ.get(name)):
        raise ValueError(f"{name} is unset")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text} is not a whole number") from None


def _check_master(launch: Launch, timeout_s: float) -> Finding:
    cure = "export MASTER_ADDR=<rank 0's IP address>, the same on every rank"
    try:
        found = within(
            timeout_s,
            lambda: socket.getaddrinfo(launch.master_addr, launch.master_port, type=socket.SOCK_STREAM),
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: the host name is malformed
        return fail("master", f"MASTER_ADDR={launch.master_addr} does not resolve ({error})", cure)
    if launch.rank == 0 and not launch.agent_store:
        return _check_port_is_free(launch)
    return _check_answers(launch, [str(address[4][0]) for address in found], min(_CONNECT_S, timeout_s))


def _check_port_is_free(launch: Launch) -> Finding:
    """Checks on rank 0 that no process listens on the port yet, over IPv4 or IPv6."""
    try:
        listen(launch.master_port).close()
    except OSError as error:
        what = "another program listens on it" if error.errno == errno.EADDRINUSE else error.strerror
        with listen(0) as free:
            cure = f"export MASTER_PORT={free.getsockname()[1]} (free here) on every rank"
        return fail("master", f"rank 0 cannot use port {launch.master_port}: {what}", cure)
    return passed("master", f"{launch.master} resolves, and the port is free here on rank 0")


def listen(port: int) -> socket.socket:
    """Returns a socket that listens on a TCP port, 0: a free one, for both families where the system has both.

    Raises:
        OSError: The port cannot be used.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=both)


def _check_answers(launch: Launch, addresses: Sequence[str], timeout_s: float) -> Finding:
    """Connects to rank 0 by each address that MASTER_ADDR means, as torch does, in their order."""
    failures: dict[str, OSError] = {}
    for address in addresses:
        try:
            socket.create_connection((address, launch.master_port), timeout_s).close()
        except OSError as error:
            failures[address] = error
            continue
        waited = [tried for tried, error in failures.items() if not isinstance(error, ConnectionRefusedError)]
        if waited:
            text = (
                f"{launch.master} answers at {address}, but not at {waited[0]} ({failures[waited[0]]}), which is first"
            )
            return warn("master", text, f"export MASTER_ADDR={address} on every rank")
        return passed("master", f"{launch.master} ({address}) answers")
    refused = any(isinstance(error, ConnectionRefusedError) for error in failures.values())
    if refused and not launch.agent_store:
        return passed("master", f"{launch.master} is reachable; no process listens yet, as rank 0 has not started")
    cure = (
        "check that MASTER_ADDR is rank 0's address on the shared network, and that no firewall "
        f"closes TCP port {launch.master_port} or the unprivileged ports between machines"
    )
    if addresses and all(":" in address for address in addresses):
        cure += "; it means IPv6 here: give this host an IPv6 address, or export MASTER_ADDR=<rank 0's IPv4 address>"
    failure = next(reversed(failures.values()), OSError("no address"))
    return fail("master", f"{launch.master} does not answer ({failure})", cure)
