"""What the stages' trainers say while they load."""

from __future__ import annotations

import logging

import pytest

from asyncrlhf.stages.training import hush_deepspeed


def test_deepspeed_does_not_warn_of_a_missing_gpu(caplog: pytest.LogCaptureFixture) -> None:
    hush_deepspeed()
    with caplog.at_level("WARNING", "DeepSpeed"):
        logging.getLogger("DeepSpeed").warning("Setting accelerator to CPU. If you have GPU, we did not detect it.")
        logging.getLogger("DeepSpeed").warning("Something else.")
    assert "Setting accelerator" not in caplog.text and "Something else." in caplog.text
