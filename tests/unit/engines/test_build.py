"""``build_engine`` gives the engine that is named, and loads a model only for one that needs it."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.build_engine import build_engine
from asyncrlhf.engines.fake import FakeEngine
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.engines.hf.hf_engine import HFEngine


def load_tiny(config: ModelConfig) -> PreTrainedModel:
    sizes = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(sizes)


def load_nothing(config: ModelConfig) -> PreTrainedModel:
    pytest.fail("the fake engine asked for a model")


def test_fake() -> None:
    config = GeneratorConfig(engine="fake", slots=5)
    engine = build_engine(config, ModelConfig(), load_model=load_nothing, vocab_size=8, version=3)
    assert isinstance(engine, FakeEngine) and engine.slots == 5 and engine.version == 3


def test_hf() -> None:
    config = GeneratorConfig(engine="hf", slots=5)
    engine = build_engine(config, ModelConfig(), load_model=load_tiny, vocab_size=8, version=3)
    assert isinstance(engine, HFEngine) and engine.slots == 5 and engine.version == 3
