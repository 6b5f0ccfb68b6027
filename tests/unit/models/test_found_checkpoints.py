"""Heads tied or not, float16, several files, own code, quantised weights, heads of multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import load_named_weights, named_weights
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.state.checkpoint import export_model
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.checkpoint_notes import checkpoint_notes
from asyncrlhf.models.pretrained import check_model, load_blank, load_model
from asyncrlhf.models.weight_files import more_heads
from tests.found import TOKENS, edit, found
from tests.mixtures import mixture
from tests.numeric import assert_close

IDS = torch.tensor([[1, 5, 9, 3, 12, 8]])


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


def export(model: transformers.PreTrainedModel, folder: Path) -> None:
    writer = StateWriter(model.device)
    writer.begin(folder)
    export_model(model, folder, None, 0, writer)
    writer.end()


def tied(model: transformers.PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def llama(ties: bool) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=TOKENS, tie_word_embeddings=ties, initializer_range=0.3, **sizes)
    return transformers.LlamaForCausalLM(config)


def nested(ties: bool) -> transformers.PreTrainedModel:
    """A text decoder inside a configuration for images, which states whether the head is tied."""
    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3, tie_word_embeddings=ties,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(text)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("family", [llama, nested])
def test_heads_tied_or_not_load_train_publish_and_export(tmp_path: Path, ties: bool, family: Any) -> None:
    config = found(tmp_path / "given", model=family(ties))
    check_model(config)
    model, engine = load_model(config).train(), load_model(config)
    assert tied(model) is ties
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.eval()
    assert (logits(model) - logits(engine)).abs().max() > 1e-3
    load_named_weights(engine, named_weights(model))
    assert torch.equal(logits(engine), logits(model))
    export(model, tmp_path / "export")
    load_tokenizer(ModelConfig()).save_pretrained(tmp_path / "export")
    again = load_model(ModelConfig(path=str(tmp_path / "export")))
    assert tied(again) is ties
    assert torch.equal(logits(again), logits(model))
    blank = load_blank(ModelConfig(path=str(tmp_path / "export")), torch.float32)
    assert blank is not None and tied(blank[0]) is ties


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_a_checkpoint_in_float16_trains_in_float32(tmp_path: Path, field: str) -> None:
    config = found(tmp_path, model=llama(ties=False).half())
    edit(tmp_path / "config.json", **{"dtype": None, field: "float16"})
    model = load_model(config)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_close(dict(model.named_parameters()), dict(llama(ties=False).half().float().named_parameters()), atol=0)
    blank = load_blank(config, torch.float32)
    assert blank is not None and {p.dtype for p in blank[0].parameters()} == {torch.float32}
    export(model, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "float32"


def test_weights_in_several_files_are_one_model(tmp_path: Path) -> None:
    config = found(tmp_path / "one", model=llama(ties=False))
    llama(ties=False).save_pretrained(tmp_path / "several", max_shard_size="2KB")
    load_tokenizer(ModelConfig()).save_pretrained(tmp_path / "several")
    several = ModelConfig(path=str(tmp_path / "several"))
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 3
    check_model(several)
    assert torch.equal(logits(load_model(several)), logits(load_model(config)))
    _, files = load_blank(several, torch.float32) or pytest.fail()
    assert torch.equal(files.rows("lm_head.weight", 0, TOKENS), llama(ties=False).lm_head.weight)
    (missing, *_) = sorted((tmp_path / "several").glob("*.safetensors"))
    missing.unlink()
    with pytest.raises(ConfigError, match=f"{missing.name} is not a complete safetensors file"):
        check_model(several)


def test_own_code_is_refused_by_the_name_of_its_setting_unless_transformers_knows_the_model(tmp_path: Path) -> None:
    config = found(tmp_path)
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "own.py").write_text("raise SystemExit('this code must not run')")
    edit(tmp_path / "config.json", auto_map=code)
    check_model(config)
    assert type(load_model(config)) is transformers.LlamaForCausalLM
    edit(tmp_path / "config.json", model_type="own")
    with pytest.raises(ConfigError, match=r"Python code of its own; model\.trust_remote_code=true allows it") as caught:
        check_model(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "method"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", {"quant_method": "compressed-tensors"}),
        ("quantization_config", {"load_in_4bit": True, "quant_method": "bitsandbytes"}),
        ("text_config", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_quantised_weights_are_refused_before_any_is_read(tmp_path: Path, place: str, method: dict[str, Any]) -> None:
    config = found(tmp_path)
    edit(tmp_path / "config.json", **{place: method})
    named = method.get("quant_method", "fp8")
    sentence = rf"holds quantised weights \({named}\), which cannot train; give the original checkpoint, or one that"
    with pytest.raises(ConfigError, match=sentence):
        check_model(config)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "llama"])
def test_heads_of_multi_token_prediction_are_left_out_with_a_sentence(tmp_path: Path, kind: str) -> None:
    model = llama(ties=False) if kind == "llama" else mixture(kind, vocab_size=TOKENS, eos_token_id=2)
    last = model.config.num_hidden_layers
    config = found(tmp_path / "given", model=model)
    file = tmp_path / "given" / "model.safetensors"
    tensors = load_file(file)
    more = {n.replace("layers.1.", f"layers.{last}."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    more |= {"mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors | more, file, {"format": "pt"})
    edit(tmp_path / "given" / "config.json", num_nextn_predict_layers=1)
    check_model(config)
    assert more_heads(load_file(file), model.config) == sorted(more)
    (note,) = checkpoint_notes(config, load_tokenizer(config))
    assert f"does not load its heads of multi-token prediction ({len(more)} tensors" in note
    loaded = load_model(config)
    assert torch.equal(logits(loaded), logits(model.eval()))
    assert (load_blank(config, torch.float32) is not None) == (kind == "llama")  # mixtures are fused while loading
    export(loaded, tmp_path / "export")
    assert not json.loads((tmp_path / "export" / "config.json").read_text()).get("num_nextn_predict_layers")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert torch.equal(logits(again.eval()), logits(model))


def test_a_checkpoint_without_a_weight_of_its_model_is_refused(tmp_path: Path) -> None:
    config = found(tmp_path, model=llama(ties=False))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"lacks 1 of its model's weights, such as lm_head\.weight; they would be init"
    ):
        load_model(config)
