"""Serves this rank's rows of optimizer states to a rank whose script saves them alone.

Under DistributedDataParallel(shard=...) a rank has rows of each state, and most scripts save on rank 0. While that rank
pickles a state dict, it asks the other ranks for their rows. A thread of theirs answers, as their scripts train on and
wait for this rank in the next backward. Rows belong to a step: both sides compare its number.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import io
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..threads import Thread
from .gather import gather_objects, on_device
from .sockets import address_towards, receive

_LIMIT_S = 300.0  # for one answer: a slow rank may still be in the step
_NONCE_BYTES = 32
_LENGTH = struct.Struct("!Q")
_OK, _ERROR = b"+", b"-"


class Request(NamedTuple):
    """Asks for the rows of one state.

    Attributes:
        step: The number of steps that the asking rank has finished.
        optimizer: The optimizer's number, in the order of first steps.
        param: The parameter's number.
        name: The state's name in the state dict.
    """

    step: int
    optimizer: int
    param: int
    name: str


class Steps:
    """Counts the steps of optimizers, so that rows are read between them only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._done = 0
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts a step that begins."""
        with self._changed:
            self._begun += 1
            if all(known() is not optimizer for known in self._optimizers):
                self._optimizers.append(weakref.ref(optimizer))

    def end(self) -> None:
        """Says that the step has ended."""
        with self._changed:
            self._done = self._begun
            self._changed.notify_all()

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Returns the optimizer's number. Raises RuntimeError if it has not stepped since it was constructed."""
        for number, known in enumerate(self._optimizers):
            if known() is optimizer:
                return number
        raise RuntimeError("the optimizer has not stepped yet")

    def optimizer(self, number: int) -> torch.optim.Optimizer:
        """Returns the optimizer of a number. Raises RuntimeError if there is none."""
        found = self._optimizers[number]() if number < len(self._optimizers) else None
        if found is None:
            raise RuntimeError("it has no such optimizer")
        return found

    def finished(self) -> int:
        """Returns the number of finished steps. Raises RuntimeError during one."""
        with self._changed:
            if self._done != self._begun:
                raise RuntimeError("a step has not ended")
            return self._done

    def between(self, step: int, read: Callable[[], Any], limit_s: float) -> Any:
        """Returns what `read` returns after `step` steps and before the next.

        Raises:
            RuntimeError: The next step has begun, or the limit has passed.
        """
        deadline = time.monotonic() + limit_s
        with self._changed:
            while self._begun < step or self._done < self._begun <= step:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RuntimeError(f"it has not finished step {step} after {limit_s:.0f} s")
        result = read() if self._begun == step else None
        with self._changed:
            if self._begun != step:
                raise RuntimeError(f"it has begun step {self._begun}, and the rows of step {step} are gone")
        return result


class StateServer:
    """Answers the requests of other ranks on a thread, and asks them.

    Args:
        group: The ranks that share states. Every rank must make its server.
        device: The device of the parameters.
        steps: Counts this rank's steps.
        read: Returns the rows that a request asks for. Runs on the thread, between steps.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, steps: Steps, read: Callable[[Request], Tensor]
    ) -> None:
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._steps = steps
        # The loopback address serves ranks that meet without a host, as in a file.
        address = address_towards(os.environ.get("MASTER_ADDR", "")) or "127.0.0.1"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=128)
        own = (listener.getsockname()[:2], secrets.token_bytes(_NONCE_BYTES))
        with on_device(device):
            everyone = gather_objects(own, group)
        self._addresses = [tuple(address) for address, _ in everyone]
        self._key = everyone[0][1]
        Thread(_serve, "drivetrain-states", (listener, steps, read, self._key, device)).start()
        self._close = weakref.finalize(self, _close, listener, os.getpid())

    def ask(self, optimizer: torch.optim.Optimizer, param: int, name: str) -> list[Tensor | None]:
        """Returns the rows of every rank as tensors on the CPU, and None for this rank.

        Raises:
            RuntimeError: A rank has ended, has gone on to another step, or does not answer.
        """
        request = Request(self._steps.finished(), self._steps.number_of(optimizer), param, name)
        return [
            None if place == self._rank else self._ask(place, address, request)
            for place, address in enumerate(self._addresses)
        ]

    def _ask(self, place: int, address: tuple[Any, ...], request: Request) -> Tensor:
        try:
            with socket.create_connection(address, timeout=_LIMIT_S + 10) as connection:
                proof = hmac.digest(self._key, receive(connection, _NONCE_BYTES), "sha256")
                _send(connection, proof + json.dumps(request).encode())
                reply = _receive(connection)
        except OSError as error:
            raise RuntimeError(f"rank {self._ranks[place]} does not answer ({error}): it may have ended") from error
        if reply[:1] == _ERROR:
            raise RuntimeError(f"rank {self._ranks[place]} has no such rows: {reply[1:].decode()}")
        rows: Tensor = torch.load(io.BytesIO(reply[1:]), weights_only=True)
        return rows


def _serve(
    listener: socket.socket, steps: Steps, read: Callable[[Request], Tensor], key: bytes, device: torch.device
) -> None:
    def rows(request: Request) -> Tensor:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # The step's kernels may still run.
        return read(request).detach().to("cpu", copy=True)

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed
        with connection, contextlib.suppress(OSError, ValueError), io.BytesIO() as file:  # a stranger's, or it broke
            connection.settimeout(10)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(nonce)
            message = _receive(connection, most=1 << 16)
            if not hmac.compare_digest(message[:_NONCE_BYTES], hmac.digest(key, nonce, "sha256")):
                continue
            connection.settimeout(_LIMIT_S)
            request = Request(*json.loads(message[_NONCE_BYTES:]))
            try:
                torch.save(steps.between(request.step, functools.partial(rows, request), _LIMIT_S), file)
            except Exception as error:  # The asking rank raises it.
                _send(connection, _ERROR + f"{type(error).__name__}: {error}".encode())
            else:
                _send(connection, _OK + file.getbuffer())


def _close(listener: socket.socket, pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked child shares the socket with the rank, which still listens.
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    listener.close()


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)))
    connection.sendall(message)


def _receive(connection: socket.socket, most: int = 1 << 62) -> bytes:
    (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
    if length > most:
        raise ValueError(f"a message of {length} bytes, expected at most {most}")
    return receive(connection, length)
