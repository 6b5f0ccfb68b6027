"""Settings of who computes the reference policy's log-probs: ``reference.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.learner.workers_config import WorkersConfig
from asyncrlhf.validation import check_choice


@dataclass(frozen=True)
class ReferenceConfig(WorkersConfig):
    """``where=learner``: the learner holds the frozen model and asks it in each step. ``where=service``: workers of
    their own do, for each rollout as it ends.

    ``dtype=auto``: float32 weights under ``learner.mixed_precision``, which is what the learner would compute.
    """

    dtype: str = "auto"  # auto | float32 | bfloat16 | float16: of the frozen weights

    def __post_init__(self) -> None:
        check_choice("reference.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        self.check("reference", "reference model")
