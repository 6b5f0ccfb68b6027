"""A reference policy from another checkpoint: what is refused, and over which ids it is a distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.actors.model_annotators import ReferenceWorker
from asyncrlhf.cluster.parts import reference_spec, service_notes
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.teacher import check_teacher
from asyncrlhf.types import Prompt, Rollout
from tests.found import EOS, edit, found
from tests.numeric import assert_close

POLICY = ModelConfig()
# A student that is a part of its teacher.
STUDENT = ("algorithm=distill", "reference.path=tiny", "model.model_init_kwargs={num_hidden_layers: 2}")


def test_a_teacher_has_the_policys_tokens(tmp_path: Path) -> None:
    assert check_teacher(POLICY, POLICY, 32, "reference.path") == []
    assert check_teacher(POLICY, found(tmp_path / "padded", rows=64), 32, "reference.path") == []
    sentence = r"reference.path=tiny_tools has another tokenizer than model.path=tiny: id"
    with pytest.raises(ConfigError, match=sentence):
        check_teacher(POLICY, ModelConfig("tiny_tools"), 32, "reference.path")
    other = found(tmp_path / "other")
    tokenizer = (tmp_path / "other" / "tokenizer.json").read_text()
    (tmp_path / "other" / "tokenizer.json").write_text(tokenizer.replace('"+"', '"%"'))
    with pytest.raises(ConfigError, match=r"is '%' there and '\+' here; allowed: a teacher with the policy's tokens"):
        check_teacher(POLICY, other, 32, "reference.path")


def test_a_teacher_with_fewer_rows_is_refused(tmp_path: Path) -> None:
    teacher = found(tmp_path)
    edit(tmp_path / "config.json", vocab_size=12)
    with pytest.raises(ConfigError, match=r"an embedding of 12 rows, and model.path=tiny samples 19 ids"):
        check_teacher(POLICY, teacher, 32, "reference.path")


def test_a_teacher_with_a_short_context_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    teacher = found(tmp_path)
    edit(tmp_path / "config.json", max_position_embeddings=20)
    assert check_teacher(POLICY, teacher, 20, "reference.path") == []
    with pytest.raises(ConfigError, match="has a context of 20 tokens, and a prompt with its answer may have 21"):
        check_teacher(POLICY, teacher, 21, "reference.path")
    with pytest.raises(ConfigError, match=r"^reference.path=/no/such"):
        check_teacher(POLICY, ModelConfig("/no/such"), 20, "reference.path")


def test_a_teacher_that_ends_answers_otherwise_is_said(tmp_path: Path) -> None:
    teacher = found(tmp_path)
    for name in ("config.json", "generation_config.json"):
        edit(tmp_path / name, eos_token_id=7)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(7)
    tokenizer.save_pretrained(tmp_path)
    (note,) = check_teacher(POLICY, teacher, 32, "reference.path")
    assert "the teacher will hold back the end of every answer" in note


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["reference.path=tiny"], "reference.path=tiny has no effect with reference.workers=0"),
        (
            ["reference=service", "reference.path=tiny"],
            "algorithm=decoupled_grpo compares with no reference policy; allowed: algorithm=distill",
        ),
        (["algorithm=distill", "algorithm.kl=none", "algorithm.beta=0"], "leaves nothing to learn from"),
        (["algorithm=distill", "algorithm.kl=reward", "algorithm.kl_estimator=k1"], "leaves nothing to learn from"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(overrides)


def test_without_a_teacher_there_is_nothing_to_distil() -> None:
    with pytest.raises(ConfigError, match=r"learns from a teacher alone, and has none; allowed: reference.path"):
        service_notes(load_config(["algorithm=distill"]))
    assert service_notes(load_config(list(STUDENT))) == []


def test_the_teacher_is_the_whole_model_and_a_distribution_over_the_students_ids(tmp_path: Path) -> None:
    """Its own layers, though the student has fewer; what its padded rows would take of the chance is not counted."""
    found(tmp_path, rows=64)
    spec = reference_spec(load_config([*STUDENT, f"reference.path={tmp_path}"]))
    assert spec is not None and spec.policy.model_init_kwargs and not spec.model.model_init_kwargs
    ids = torch.tensor([[1, 5, 14, 6, 17, 7, EOS]])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        logits = model(ids).logits[0, [4, 5]]
        whole, own = (logits[:, :count].log_softmax(-1)[[0, 1], [7, EOS]].numpy() for count in (64, 19))
    rollout = Rollout(
        rollout_id=0,
        group_id=0,
        prompt=Prompt("", "", ids[0, :5].numpy()),
        response_ids=ids[0, 5:].numpy(),
        behavior_logprobs=np.zeros(2, np.float32),
        policy_versions=np.zeros(2, np.int64),
        finish_reason="stop",
    )
    _, bundle = ReferenceWorker(spec).annotate([rollout])
    assert_close(bundle[0]["ref_logprobs"], own, atol=1e-5)
    assert np.abs(whole - own).max() > 0.1
