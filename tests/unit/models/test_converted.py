"""Adapters and MXFP4 checkpoints: the model that their own libraries compute, written once; refused ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from asyncrlhf.data.data_config import LoraConfig as OwnLora
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models import converted
from asyncrlhf.models.checkpoint_folder import load_tokenizer, resolve
from asyncrlhf.models.checkpoint_notes import checkpoint_notes
from asyncrlhf.models.pretrained import check_model, load_blank, load_model, load_policy
from tests.found import TOKENS, edit, found
from tests.numeric import FLOAT32, assert_close

IDS = torch.tensor([[1, 5, 9, 3, 12, 8]])


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ASYNCRLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def adapter(folder: Path, base: Path, *, by: float = 0.1, **more: object) -> ModelConfig:
    """A folder as ``PeftModel.save_pretrained`` writes it, its matrices random."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules="all-linear", **more)
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, by)
    model.save_pretrained(folder)
    edit(folder / "adapter_config.json", base_model_name_or_path=str(base))
    return ModelConfig(path=str(folder))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def test_an_adapter_is_merged_into_its_base_once(tmp_path: Path, cache: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    found(base)
    config = adapter(folder, base, use_rslora=True)
    check_model(config)
    beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    assert (logits(beside) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.1
    assert_close(logits(load_model(config)), logits(beside), rtol=0, atol=FLOAT32)
    whole = Path(resolve(config.path))
    assert whole.parent == cache
    assert_close(logits(AutoModelForCausalLM.from_pretrained(whole)), logits(beside), rtol=0, atol=FLOAT32)
    assert load_blank(config, torch.float32) is not None  # sharded learners read the files of the merged one
    assert load_tokenizer(config).get_vocab() == load_tokenizer(ModelConfig()).get_vocab()
    (note,) = checkpoint_notes(config, load_tokenizer(config))
    assert f"is an adapter: training starts from {base} with the adapter merged into it, in {whole}" in note
    assert [entry.name for entry in cache.iterdir()] == [whole.name]
    adapter(folder, base, by=0.2)  # another adapter in the same place
    assert resolve(config.path) != str(whole)


def test_a_new_adapter_starts_on_the_merged_one(tmp_path: Path) -> None:
    found(tmp_path / "base")
    config = adapter(tmp_path / "adapter", tmp_path / "base")
    fresh = ModelConfig(path=config.path, lora=OwnLora(r=2))
    check_model(fresh)
    policy = load_policy(fresh)
    assert_close(logits(policy), logits(load_model(config)), rtol=0, atol=FLOAT32)
    assert all("lora_" in name for name, p in policy.named_parameters() if p.requires_grad)
    assert checkpoint_notes(fresh, load_tokenizer(fresh))[0].endswith("model.lora.r=2 starts a new adapter on it.")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"base_model_name_or_path": "/no/such/base"}, "is an adapter of /no/such/base, which is no checkpoint here"),
        (
            {"base_model_name_or_path": "no-such/base"},
            "of no-such/base, which cannot be found as a folder or on the hub",
        ),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"task_type": "SEQ_CLS"}, "is an adapter for SEQ_CLS; allowed: one of a causal language model"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_one_sentence(
    tmp_path: Path, changes: dict[str, str | None], sentence: str
) -> None:
    found(tmp_path / "base")
    config = adapter(tmp_path / "adapter", tmp_path / "base")
    edit(tmp_path / "adapter" / "adapter_config.json", **changes)
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_model(config)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_or_of_a_quantised_one_is_refused(tmp_path: Path) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    found(base)
    config = adapter(tmp_path / "adapter", base)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    given = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    save_file({name: tensor[:, :-1].contiguous() for name, tensor in given.items()}, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"is an adapter that PEFT cannot merge into {base}: ") as caught:
        check_model(config)
    assert "\n" not in str(caught.value)
    names = {name.replace("self_attn", "attention"): tensor for name, tensor in given.items()}
    save_file(names, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"cannot merge into .*: Found missing adapter keys"):
        check_model(config)
    found(other)
    edit(other / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(other))
    with pytest.raises(ConfigError, match=r"whose weights are quantised \(bitsandbytes\); correct base_model_name"):
        check_model(config)


def test_an_adapter_on_the_hub_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(tmp_path / "base")
    adapter(tmp_path / "adapter", tmp_path / "base")
    hub = {"someone/adapter": tmp_path / "adapter", "someone/whole": tmp_path / "base"}

    def cached_file(path: str, name: str, **options: object) -> str | None:
        file = hub[path] / name
        return str(file) if file.is_file() else None

    merged: list[str] = []
    monkeypatch.setattr(converted, "cached_file", cached_file)
    monkeypatch.setattr(converted, "_merge", lambda path, *_: merged.append(path) or (_[-1] / "config.json").touch())
    assert resolve("someone/whole") == "someone/whole"
    assert resolve("someone/adapter").startswith(str(tmp_path / "cache"))
    assert resolve("someone/adapter") and merged == ["someone/adapter"]


def mxfp4(folder: Path) -> torch.nn.Module:
    """A gpt-oss checkpoint with its experts in MXFP4, and the model that it stands for."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        layer_types=["full_attention"] * 2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval()
    found(folder, model=model)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])  # of the four bits of a number: sign, two of exponent, one of mantissa
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensor = tensors.pop(name)  # [experts, in, out], whose rows of 32 inputs share a power of two
        experts, width, out = tensor.shape
        codes = torch.randint(0, 16, (experts, out, width // 32, 32))
        powers = torch.randint(-6, -3, (experts, out, width // 32))
        tensors[f"{name}_blocks"] = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)  # the first is low
        tensors[f"{name}_scales"] = (powers + 127).to(torch.uint8)
        plain = (values[codes] * 2.0 ** powers[..., None]).flatten(2).transpose(1, 2)
        model.get_parameter(name).data.copy_(plain)
    save_file(tensors, file, {"format": "pt"})
    edit(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return model


def test_mxfp4_is_dequantised_once_with_a_sentence(tmp_path: Path, cache: Path) -> None:
    expected, config = mxfp4(tmp_path / "gpt-oss"), ModelConfig(path=str(tmp_path / "gpt-oss"))
    check_model(config)
    model = load_model(config)
    own = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        exact = name.endswith(("gate_up_proj", "down_proj"))
        assert_close(own[name], parameter if exact else parameter.bfloat16().float(), rtol=0, atol=0)
    assert not hasattr(model.config, "quantization_config")
    assert Path(resolve(config.path)).parent == cache
    (note,) = checkpoint_notes(config, load_tokenizer(config))
    assert "its MXFP4 weights were dequantised to bfloat16 in" in note
    assert len(list(cache.iterdir())) == 1
