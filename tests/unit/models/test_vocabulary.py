"""Which ids are sampled and which end an answer, for checkpoints as users bring them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.checkpoint_notes import checkpoint_notes
from asyncrlhf.models.pretrained import check_model, load_model, load_sampled
from asyncrlhf.models.vocabulary import check_prompts, check_template, end_tokens, sampled_ids, sampled_vocabulary
from asyncrlhf.stages.statistics import response_logprobs
from asyncrlhf.types import Prompt, Rollout
from tests.found import EOS, TOKENS, edit, found
from tests.numeric import FLOAT32, assert_close


def ends(config: ModelConfig) -> tuple[int, ...]:
    return end_tokens(config, load_tokenizer(config))


def test_every_end_token_that_tokenizer_and_checkpoint_state_ends_an_answer(tmp_path: Path) -> None:
    config = found(tmp_path)
    assert ends(config) == ends(ModelConfig()) == (EOS,)
    edit(tmp_path / "generation_config.json", eos_token_id=[7, EOS, 5])
    assert ends(config) == (EOS, 7, 5)
    edit(tmp_path / "config.json", eos_token_id=[9, 7])
    assert ends(config) == (EOS, 7, 5, 9)
    (tmp_path / "generation_config.json").unlink()
    assert ends(config) == (EOS, 9, 7)
    edit(tmp_path / "config.json", eos_token_id=None)  # its class has a default, which the checkpoint does not state
    assert ends(config) == (EOS,)


def test_an_end_token_beyond_the_vocabulary_is_ignored_with_a_sentence(tmp_path: Path) -> None:
    config = found(tmp_path, rows=64)
    assert checkpoint_notes(config, load_tokenizer(config)) == []
    edit(tmp_path / "generation_config.json", eos_token_id=[5, 40, 1000])
    assert ends(config) == (EOS, 5)
    check_model(config)
    (note,) = checkpoint_notes(config, load_tokenizer(config))
    assert "end tokens 40, 1000 are not among the model's 19 ids" in note


def test_a_tokenizer_without_end_token_takes_the_checkpoints(tmp_path: Path) -> None:
    config = found(tmp_path, without_eos=True)
    edit(tmp_path / "generation_config.json", eos_token_id=[500, 7, 5])
    assert load_tokenizer(config).eos_token_id == 7
    assert ends(config) == (7, 5, EOS)
    for name in ("generation_config.json", "config.json"):
        edit(tmp_path / name, eos_token_id=None)
    with pytest.raises(ConfigError, match="has no eos token, so no response could ever end"):
        check_model(config)


def test_only_ids_of_the_tokenizer_are_sampled(tmp_path: Path) -> None:
    config = found(tmp_path, rows=200)
    assert sampled_vocabulary(config, load_tokenizer(config)) == TOKENS
    assert sampled_ids(load_sampled(config)) == TOKENS
    assert sampled_ids(load_sampled(ModelConfig())) is None  # nothing to leave out


def test_tokens_beyond_the_embedding_are_refused_where_a_prompt_holds_them(tmp_path: Path) -> None:
    config = found(tmp_path)
    tokenizer = load_tokenizer(config)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(config)
    check_model(config)
    assert sampled_vocabulary(config, tokenizer) == TOKENS
    (note,) = checkpoint_notes(config, tokenizer)
    assert "1 tokens beyond the 19 rows of the model's embedding, such as <image>" in note
    plain, strange = (Prompt("", "", np.array(tokenizer(text).input_ids)) for text in ("1+2=", "1<image>2="))
    check_prompts(config, tokenizer, [plain])
    sentence = r"a prompt holds <image> \(id 19\), and the model's embedding has 19 rows; resize it with"
    with pytest.raises(ConfigError, match=sentence):
        check_prompts(config, tokenizer, [plain, strange])
    check_template(config, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<image>{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="the chat template writes <image>, which is beyond the 19 rows"):
        check_template(config, tokenizer)


def test_an_end_token_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    config = found(tmp_path)
    tokenizer = load_tokenizer(config)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.save_pretrained(tmp_path)
    check_model(config)  # the checkpoint's own end token remains
    for name in ("generation_config.json", "config.json"):
        edit(tmp_path / name, eos_token_id=None)
    with pytest.raises(ConfigError, match=r"the end token <\|im_end\|> is beyond the rows of the model's embedding"):
        check_model(config)


def test_the_model_itself_is_the_same(tmp_path: Path) -> None:
    config = found(tmp_path, rows=200)
    assert load_model(config).get_output_embeddings().weight.shape[0] == 200


def test_evaluations_give_log_probs_over_the_same_ids(tmp_path: Path) -> None:
    config = found(tmp_path, rows=200)
    ids, zeros = np.array([1, 5, 9, 3, 12]), np.zeros(3, np.float32)
    answer = Rollout(0, 0, Prompt("", "", ids[:2]), ids[2:], zeros, zeros.astype(np.int64), "length")
    ((found_logprobs,),) = response_logprobs(load_sampled(config), [answer], [0.7])
    with torch.no_grad():
        logits = load_model(config).double()(torch.from_numpy(ids)[None]).logits[0, 1:-1, :TOKENS]
    own = (logits / 0.7).log_softmax(-1).gather(1, torch.from_numpy(ids[2:, None]))[:, 0]
    assert_close(found_logprobs, own.numpy(), rtol=0, atol=FLOAT32)
