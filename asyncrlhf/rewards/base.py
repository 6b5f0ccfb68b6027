"""The RewardFunction protocol: the signature of TRL's reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class RewardFunction(Protocol):
    """Scores completions. A reward function written for TRL's trainers works here as it is.

    ``prompts`` are the task's texts (without chat template), ``completions`` the responses without special tokens. The
    columns, each a list as long as ``prompts``: ``answer`` (str or None), ``metadata`` (dict) and ``completion_ids``
    (list of int). More may come; take them up in ``**columns``. Returns one finite number a completion, in order.
    """

    def __call__(self, prompts: list[str], completions: list[str], **columns: list[Any]) -> Sequence[float]: ...
