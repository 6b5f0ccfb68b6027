"""Builds the engine that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import Decode, Engine
from asyncrlhf.engines.generator_config import GeneratorConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from asyncrlhf.engines.fake import AnswerIds


def build_engine(
    config: GeneratorConfig,
    model: ModelConfig,
    *,
    load_model: Callable[[ModelConfig], PreTrainedModel],
    vocab_size: int,
    version: int = 0,
    answer_ids: AnswerIds | None = None,
    decode: Decode | None = None,
    offloads: bool = False,
    routes: bool = False,
) -> Engine:
    """``load_model`` and ``offloads`` are for the hf engine (vLLM loads the checkpoint itself); ``answer_ids`` is for
    the fake engine, ``decode`` for stop texts. ``vocab_size``: ids from this one on are never sampled. ``routes``:
    rollouts report the experts of each token."""
    engine: Engine
    common = {"slots": config.slots, "version": version}
    # Each engine's imports take seconds, but those of the fake one.
    if config.engine == "fake":
        from asyncrlhf.engines.fake import FakeEngine

        engine = FakeEngine(config.fake, vocab_size=vocab_size, answer_ids=answer_ids, **common)
    elif config.engine == "vllm":
        from asyncrlhf.engines.vllm.core import VllmCore
        from asyncrlhf.engines.vllm.vllm_engine import VllmEngine

        engine = VllmEngine(VllmCore(config, model, routes, vocab_size), **common)
    else:
        from asyncrlhf.engines.hf.hf_engine import HFEngine

        engine = HFEngine(
            load_model(model),
            offloads=offloads,
            routes=routes,
            sampled=vocab_size,
            cache=config.kept,
            longest=config.max_completion_length,
            **common,
        )
    engine.decode = decode
    return engine
