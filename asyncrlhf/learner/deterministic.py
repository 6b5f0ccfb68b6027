"""Torch's deterministic algorithms while a call lasts: ``learner.deterministic``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cudnn

from asyncrlhf.errors import ConfigError

_REFUSED = re.compile(r"(\S[^\n]*?) does not have a deterministic implementation")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If ``wanted``, torch uses only algorithms within this context that give the same bits for the same input on the
    same device; the previous state returns with its end, since other parts may run in the same process.

    Raises ConfigError with one sentence for an operation that has no such algorithm.
    """
    if not wanted:
        yield
        return
    uninitialized: Any = torch.utils.deterministic  # its attribute is found by its class alone
    # For cuBLAS in libraries beside torch, which gives it workspaces of its own; without effect once CUDA has started.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    others = uninitialized.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)
        # Filling costs a write of each new tensor; the tests prove with it on that a step reads only what it wrote.
        uninitialized.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark = False, True, False
        yield
    except RuntimeError as error:
        if (found := _REFUSED.search(str(error))) is None:
            raise
        raise ConfigError(
            f"learner.deterministic=true, but torch's {found[1]} has no deterministic algorithm; allowed: false, or a "
            "model, loss and settings without this operation."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        uninitialized.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark = others
