"""Makes the engine that ``generator.engine`` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import Engine
from asyncrlhf.engines.fake import AnswerIds, FakeEngine
from asyncrlhf.engines.generator_config import GeneratorConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_engine(
    config: GeneratorConfig,
    model: ModelConfig,
    *,
    load_model: Callable[[ModelConfig], PreTrainedModel],
    vocab_size: int,
    version: int = 0,
    answer_ids: AnswerIds | None = None,
) -> Engine:
    """``load_model`` is called for the hf engine (vLLM loads the checkpoint itself); ``vocab_size`` and ``answer_ids``
    serve the fake one.
    """
    if config.engine == "fake":
        return FakeEngine(
            config.fake, slots=config.slots, vocab_size=vocab_size, version=version, answer_ids=answer_ids
        )
    if config.engine == "vllm":
        from asyncrlhf.engines.vllm_core import VllmCore
        from asyncrlhf.engines.vllm_engine import VllmEngine

        return VllmEngine(VllmCore(config, model), slots=config.slots, version=version)
    from asyncrlhf.engines.hf import HFEngine  # transformers takes seconds to import, and the fake engine needs none

    return HFEngine(load_model(model), slots=config.slots, version=version)
