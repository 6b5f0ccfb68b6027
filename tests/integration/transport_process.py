"""A weight receiver in a process of its own, steered over a pipe, with the ways to fail that the tests need."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.audit import tensor_digests
from asyncrlhf.transport.collective.chain import Chain
from asyncrlhf.transport.collective.group import BroadcastGroup
from asyncrlhf.transport.collective.receiver import CollectiveReceiver


def die_after_first_bucket(self: BroadcastGroup, tensors: list[torch.Tensor]) -> None:
    """Stands in for ``BroadcastGroup.broadcast``: the process is killed when part of the weights has arrived."""
    self._group.broadcast([tensors[0]], torch.distributed.BroadcastOptions()).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def stop_after_first_bucket(self: BroadcastGroup, tensors: list[torch.Tensor]) -> None:
    """Stands in for ``BroadcastGroup.broadcast``: the process hangs in the middle of the weights."""
    self._group.broadcast([tensors[0]], torch.distributed.BroadcastOptions()).wait()
    os.kill(os.getpid(), signal.SIGSTOP)


FAILURES = {"die": die_after_first_bucket, "stop": stop_after_first_bucket}


class FailingGroup:
    """Stands in for the group of a ``Chain``: the process gets a signal when so many pieces have been asked for."""

    def __init__(self, group: Any, pieces: int, number: int) -> None:
        self._group, self._left, self._number = group, pieces, number

    def recv(self, *arguments: Any) -> Any:
        if self._left == 0:
            os.kill(os.getpid(), self._number)
        self._left -= 1
        return self._group.recv(*arguments)

    def send(self, *arguments: Any) -> Any:
        return self._group.send(*arguments)


def fail_in_the_chain(pieces: int, number: int) -> None:
    begin = Chain.begin

    def begin_and_fail(self: Chain, tensor: torch.Tensor) -> Any:
        if len(tensor) > 1 and not isinstance(self._group, FailingGroup):  # not the byte with which a group forms
            self._group = FailingGroup(self._group, pieces, number)
        return begin(self, tensor)

    Chain.begin = begin_and_fail  # type: ignore[method-assign]


def serve(pipe: Connection, timeout_seconds: float) -> None:
    """Answer each order with ``(result, seconds)``, the result an error's sentence where one was raised."""
    torch.set_num_threads(1)
    receiver = CollectiveReceiver(timeout_seconds=timeout_seconds)
    pipe.send(("up", 0.0))
    while True:
        try:
            order, arguments = pipe.recv()
        except EOFError:
            return
        started = time.monotonic()
        result: Any = None
        try:
            if order == "connect":
                receiver.connect(*arguments)
            elif order == "fail in the chain":
                fail_in_the_chain(*arguments)
            elif order == "fail":
                BroadcastGroup.broadcast = FAILURES[arguments]  # type: ignore[method-assign]
            else:
                result = tensor_digests(receiver.receive(arguments))
        except WeightSyncError as error:
            result = str(error)
        pipe.send((result, time.monotonic() - started))
