"""``sft.trainer_kwargs`` and ``reward_model.trainer_kwargs``: what reaches TRL's arguments, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.stages.training import _with_keywords

GIVEN = {"output_dir": "unused", "seed": 3, "use_cpu": True, "bf16": False, "report_to": "none"}


def arguments(**more: Any) -> Any:
    from trl import SFTConfig

    return _with_keywords(SFTConfig, GIVEN, more, "sft.trainer_kwargs")


def test_keywords_reach_trl_beside_our_defaults() -> None:
    made = arguments(warmup_steps=7, lr_scheduler_type="cosine")
    assert (made.warmup_steps, made.lr_scheduler_type, made.seed) == (7, "cosine", 3)
    assert made.gradient_checkpointing is False, "TRL's own default is true"
    assert arguments(gradient_checkpointing=True).gradient_checkpointing is True


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"warmup_stepz": 1}, r"^sft\.trainer_kwargs\.warmup_stepz is not a field of TRL's SFTConfig \(did you mean"),
        ({"seed": 1}, r"^sft\.trainer_kwargs\.seed follows from other settings"),
        ({"lr_scheduler_type": "up"}, r"^sft\.trainer_kwargs=.*up.* is refused by TRL: "),
    ],
)
def test_what_trl_does_not_take_is_one_sentence(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        arguments(**more)
    assert "\n" not in str(caught.value)
