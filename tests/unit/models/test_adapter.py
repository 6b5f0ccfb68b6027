"""LoRA adapters against PEFT: what is trained, what is sent, what the merged weights compute, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrlhf.data.data_config import LoraConfig, ModelConfig
from asyncrlhf.engines.engine import AdapterMerge, named_weights
from asyncrlhf.errors import ConfigError, WeightSyncError
from asyncrlhf.learner.state.checkpoint import export_model
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.models.adapter import add_adapter, merged, merged_state, trained_tensors
from asyncrlhf.models.pretrained import check_model, load_model, load_policy
from tests.numeric import assert_close

TEXT = torch.arange(3, 15)[None]
LORA = LoraConfig(r=3, alpha=5, target_modules=["q_proj", "down_proj"])
DOWN = "model.layers.1.self_attn.q_proj.lora_A.default.weight"


@torch.no_grad()
def moved(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with an adapter that does something: B is no longer zero."""
    torch.manual_seed(3)
    for name, tensor in trained_tensors(model).items():
        if "lora_B" in name:
            tensor.copy_(0.1 * torch.randn(tensor.shape))
    return model


@pytest.fixture
def adapted() -> PreTrainedModel:
    return moved(add_adapter(load_model(ModelConfig()), LORA))


def test_only_the_adapter_is_trained_and_it_starts_as_the_model_itself() -> None:
    plain, policy = load_model(ModelConfig()), load_policy(ModelConfig(lora=LORA))
    assert type(policy) is type(plain)
    assert torch.equal(policy(TEXT).logits, plain(TEXT).logits)
    names = list(trained_tensors(policy))
    assert len(names) == 2 * 2 * plain.config.num_hidden_layers
    assert all("lora_" in n and ("q_proj" in n or "down_proj" in n) for n in names)
    assert sum(t.numel() for t in trained_tensors(policy).values()) < 0.05 * plain.num_parameters()


def test_the_merged_weights_compute_what_the_adapted_model_does(adapted: PreTrainedModel) -> None:
    base = named_weights(load_model(ModelConfig()))
    weights = AdapterMerge(LORA, base)(trained_tensors(adapted))
    assert list(weights) == list(base)
    for name, tensor in weights.items():
        if "q_proj" not in name and "down_proj" not in name:
            assert torch.equal(tensor, base[name])
    down, up = (
        trained_tensors(adapted)[DOWN.replace("lora_A", half)].double().numpy() for half in ("lora_A", "lora_B")
    )
    slow = base["model.layers.1.self_attn.q_proj.weight"].double().numpy() + 5.0 / 3 * np.matmul(up, down)
    assert_close(weights["model.layers.1.self_attn.q_proj.weight"].numpy(), slow, atol=1e-6)
    merged_model = load_model(ModelConfig())
    merged_model.load_state_dict(dict(weights), strict=False)
    moved_by = (adapted(TEXT).logits - load_model(ModelConfig())(TEXT).logits).abs().max()
    assert_close(merged_model(TEXT).logits, adapted(TEXT).logits, rtol=0, atol=1e-4)
    assert moved_by > 0.1


def test_versions_are_made_from_the_base_and_leave_it_alone(adapted: PreTrainedModel) -> None:
    base = {name: tensor.bfloat16() for name, tensor in named_weights(load_model(ModelConfig())).items()}
    merge = AdapterMerge(LORA, base)
    first = merge(trained_tensors(adapted))
    moved(adapted)
    merge({name: 3 * tensor for name, tensor in trained_tensors(adapted).items()})
    again = merge(trained_tensors(adapted))
    assert all(torch.equal(first[name], again[name]) and first[name].dtype == torch.bfloat16 for name in base)
    whole = named_weights(load_model(ModelConfig()))
    assert merge(whole) is whole


def test_the_export_is_the_plain_model_with_the_adapter_merged(adapted: PreTrainedModel, tmp_path: Path) -> None:
    writer = StateWriter(torch.device("cpu"))
    writer.begin(tmp_path)
    export_model(adapted, tmp_path, None, 0, writer)
    writer.end()
    saved, keys = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not keys["missing_keys"] and not keys["unexpected_keys"]
    assert_close(saved(TEXT).logits, adapted(TEXT).logits, rtol=0, atol=1e-4)
    plain = load_model(ModelConfig())
    assert merged_state(plain).keys() == plain.state_dict().keys()


def test_an_adapter_that_does_not_fit_is_named(adapted: PreTrainedModel) -> None:
    base, adapter = named_weights(load_model(ModelConfig())), trained_tensors(adapted)
    lonely = {name: tensor for name, tensor in adapter.items() if name != DOWN}
    for wrong, sentence in (
        (lonely, r"model\.layers\.1\.self_attn\.q_proj is not a pair"),
        ({**adapter, "model.norm.weight": torch.zeros(2)}, r"model\.norm\.weight is not a pair"),
        ({**adapter, DOWN: torch.zeros(3, 7)}, r"q_proj is \(128, 128\), and its pair \(128, 3\) times \(3, 7\)"),
    ):
        with pytest.raises(WeightSyncError, match=sentence):
            merged(base, wrong, 1.0)
    missing = {name: tensor for name, tensor in base.items() if "layers.1.self_attn.q_proj" not in name}
    with pytest.raises(WeightSyncError, match=r"layers\.1\.self_attn\.q_proj is not a pair beside a weight"):
        merged(missing, adapter, 1.0)


def test_nonsense_is_refused_in_one_sentence_before_any_weight_is_read() -> None:
    lora = LoraConfig(r=4, target_modules=["query"])
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules=\['query'\] names no layer .* down_proj, gate"):
        check_model(ModelConfig(lora=lora))
    check_model(ModelConfig(lora=LoraConfig(r=4)))
    for wrong, sentence in (
        ({"r": -1}, r"model\.lora\.r=-1"),
        ({"r": 4, "alpha": 0}, r"model\.lora\.alpha=0"),
        ({"target_modules": ["q_proj"]}, r"has no effect with model\.lora\.r=0"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            LoraConfig(**wrong)
