"""vLLM on small models of several families, exported as checkpoints: log-probs of its samples are those of plain passes
of transformers over each answer alone. Answers are three windows long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.engines.vllm.core import VllmCore
from asyncrlhf.engines.vllm.vllm_engine import VllmEngine
from asyncrlhf.models.miniature import WINDOW, build_miniature, miniature_config
from tests.numeric import FLOAT32, assert_close
from tests.vllm_tiny import finish, needs_vllm, own_logprobs, requests

pytestmark = [*needs_vllm, pytest.mark.thorough]
HEAD_SIZE = 32  # the smallest of vLLM's attention on a CPU
ANSWERS = 200  # of each family, a thousand together
FAMILIES = ("gemma2", "gemma3_text", "mistral", "qwen3", "gpt_oss")  # windows, soft caps, sinks, experts


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_log_probs_of_plain_passes(family: str, tmp_path: Path) -> None:
    shape = miniature_config(AutoConfig.for_model(family))
    shape.head_dim = HEAD_SIZE
    model = build_miniature(shape)
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    own = VllmConfig(
        engine_kwargs={"block_size": 32, "max_num_batched_tokens": 512}, kv_cache_gb=0.05, max_model_len=128
    )
    engine = VllmEngine(
        VllmCore(GeneratorConfig(engine="vllm", slots=32, vllm=own), ModelConfig(path=str(tmp_path))), slots=32
    )
    try:
        engine.submit(requests(ANSWERS, 3 * WINDOW, prompt=6))
        for answer in finish(engine).values():
            text = np.concatenate([answer.prompt.token_ids, answer.response_ids])
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0]
            expected = own_logprobs(logits, text)[len(answer.prompt.token_ids) - 1 :]
            assert_close(answer.behavior_logprobs, expected, atol=FLOAT32)
    finally:
        engine.close()
