"""Language models of multi-modal checkpoints: what is copied computes what the multi-modal model does for text."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models import text_copy
from asyncrlhf.models.checkpoint_folder import load_tokenizer, named, resolve
from asyncrlhf.models.pretrained import check_model, load_blank, load_model
from asyncrlhf.models.text_copy import put_back
from tests.composites import FAMILIES, composite, save_composite
from tests.loop import run
from tests.numeric import assert_close

TEXT = torch.tensor([[3, 7, 2, 9, 5, 4, 11, 8, 6, 3, 10, 2, 7, 5, 9, 4, 12, 3, 8, 6, 2, 11, 5, 7]])  # over the windows
TRAINED = [kind for kind in FAMILIES if kind != "paligemma"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNCRLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    """[1, T, V] in float64, by transformers' own plain attention and experts."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model.double()(input_ids=TEXT, use_cache=False).logits
        return found.log_softmax(-1)


def names(folder: str | Path) -> set[str]:
    return {name for file in Path(folder).glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118


def text_parameters(whole: PreTrainedModel) -> int:
    """Its layers' and embeddings' parameters, and the output layer's unless it is tied."""
    parts = {id(p): p.numel() for p in whole.get_decoder().parameters()}
    parts |= {id(p): p.numel() for p in whole.get_output_embeddings().parameters()}
    return sum(parts.values())


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.more_but(every=5)
def test_it_computes_what_the_multi_modal_model_does_for_text(kind: str, tmp_path: Path) -> None:
    whole = save_composite(tmp_path / kind, kind)
    config = ModelConfig(path=str(tmp_path / kind))
    check_model(config)
    text = load_model(config)
    assert sum(p.numel() for p in text.parameters()) == text_parameters(whole)
    assert_close(logprobs(text), logprobs(whole))
    copied = names(resolve(config.path))
    assert copied and not [
        name for name in copied if any(w in name for w in ("vision", "visual", "audio", "projector"))
    ]
    assert text.config.model_type != "qwen2" or "mrope_section" not in text.config.rope_parameters
    again = load_tokenizer(config)
    assert again.get_vocab() == load_tokenizer(ModelConfig()).get_vocab()


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
@pytest.mark.parametrize("tied", [False, True])
def test_shards_ties_and_either_form_of_the_names(kind: str, tied: bool, tmp_path: Path) -> None:
    whole = save_composite(tmp_path / "shards", kind, shard="20KB", tie_word_embeddings=tied)
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 3
    shutil.copytree(tmp_path / "shards", tmp_path / "new", ignore=shutil.ignore_patterns("*.safetensors*"))
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}  # the names of transformers 5, twice
    save_file(state, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    expected = logprobs(whole)
    for place in ("shards", "new"):
        text = load_model(ModelConfig(path=str(tmp_path / place)))
        assert (text.get_output_embeddings().weight is text.get_input_embeddings().weight) == tied
        assert_close(logprobs(text), expected)
        blank = load_blank(ModelConfig(path=str(tmp_path / place)), torch.float32)
        assert blank is not None, "ranks of a sharded learner read their parts from the copy"


def test_an_output_layer_that_differs_from_the_embedding_is_not_tied_to_it(tmp_path: Path) -> None:
    whole = save_composite(tmp_path, "gemma3")
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    state["lm_head.weight"] *= 2
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    text = load_model(ModelConfig(path=str(tmp_path)))
    assert torch.equal(text.get_output_embeddings().weight, 2 * text.get_input_embeddings().weight)
    assert not text.config.tie_word_embeddings, "other loaders than transformers' own believe the config"


def test_tensors_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save_composite(tmp_path, "qwen3_vl_moe")
    monkeypatch.setattr(text_copy, "FILE_BYTES", 1)
    folder = resolve(str(tmp_path))
    assert len([*Path(folder).glob("*.safetensors")]) > 3
    assert_close(logprobs(load_model(ModelConfig(path=str(tmp_path)))), logprobs(whole))


def test_it_is_copied_once_and_again_when_the_checkpoint_changed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_composite(tmp_path / "a", "mistral3")
    calls: list[Path] = []
    write = text_copy.write_text_part
    monkeypatch.setattr(text_copy, "write_text_part", lambda *given: (calls.append(given[0]), write(*given)))
    with ThreadPoolExecutor(3) as several:
        first = {*several.map(resolve, [str(tmp_path / "a")] * 3)}
    assert len(first) == len(calls) == 1
    assert {path.name for path in cache.iterdir() if not path.name.startswith(".")} == {Path(*first).name}
    assert resolve(*first) == next(iter(first)), "the copy is no multi-modal checkpoint"
    save_composite(tmp_path / "a", "mistral3", spatial_merge_size=1)
    assert resolve(str(tmp_path / "a")) not in first
    assert named(str(tmp_path / "a")) == str(tmp_path / "a")


def test_a_run_trains_it_and_its_export_goes_back_into_the_checkpoint(tmp_path: Path) -> None:
    whole = save_composite(tmp_path / "whole", "qwen2_5_vl", shard="20KB")
    settings = ("async.mode=sync", "steps=2", "batch_size=8", "num_generations=4", "learner.learning_rate=1e-2",
                "reward.kind=python", "reward.target=tests.reward_functions:one_for_digits")  # fmt: skip
    finished = run(
        tmp_path / "run", *settings, f"model.path={tmp_path / 'whole'}", "checkpoint.at_end=true",
        "generator.max_completion_length=4", "task.digits=1", "generator.slots=8",
    )  # fmt: skip
    assert len(finished.metrics) >= 2
    (export,) = (tmp_path / "run" / "checkpoints").glob("*/learner/model")
    started = load_model(ModelConfig(path=str(tmp_path / "whole")))
    trained = load_model(ModelConfig(path=str(export)))
    assert names(export) == names(resolve(str(tmp_path / "whole")))
    assert {n: p.shape for n, p in trained.named_parameters()} == {n: p.shape for n, p in started.named_parameters()}

    assert (logprobs(trained) - logprobs(started)).abs().max() > 0.1, "it learned, or the rest says nothing"

    out = put_back(export, tmp_path / "whole", tmp_path / "out")
    back = AutoModelForMultimodalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    assert_close(logprobs(back), logprobs(trained))
    old, new = whole.float().state_dict(), back.float().state_dict()
    towers = [name for name in old if "visual" in name]
    assert towers and all(torch.equal(old[name], new[name]) for name in towers)
    assert {file.name for file in out.iterdir()} == {file.name for file in (tmp_path / "whole").iterdir()}
    with pytest.raises(ConfigError, match="exists; give a new folder"):
        put_back(export, tmp_path / "whole", tmp_path / "out")
    save_composite(tmp_path / "other", "gemma3")
    with pytest.raises(ConfigError, match="cannot be put in the places of those of"):
        put_back(export, tmp_path / "other", tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("kind", ["clip", "whisper"])
def test_a_model_without_a_language_model_is_refused(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"has the model type {kind}, which does not generate text"):
        check_model(ModelConfig(path=str(tmp_path)))


def test_a_language_model_that_reads_prompts_otherwise_is_refused(tmp_path: Path) -> None:
    """A prompt's tokens see each other in PaliGemma, in Gemma only those before them."""
    save_composite(tmp_path, "paligemma")
    with pytest.raises(
        ConfigError, match=r"model type paligemma \(gemma\) cannot be trained alone: .* computes the same"
    ):
        check_model(ModelConfig(path=str(tmp_path)))


def test_damaged_quantised_and_incomplete_checkpoints_are_refused(tmp_path: Path, cache: Path) -> None:
    def refused(change: Any, sentence: str) -> None:
        folder = tmp_path / "broken"
        shutil.copytree(tmp_path / "whole", folder)
        change(folder)
        with pytest.raises(ConfigError, match=sentence):
            check_model(ModelConfig(path=str(folder)))
        shutil.rmtree(folder)

    def cut(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])

    def drop(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[next(name for name in tensors if name.endswith("language_model.model.norm.weight"))]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def narrow(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if name.endswith("language_model.model.norm.weight"))
        save_file(tensors | {name: tensors[name][:-1].clone()}, folder / "model.safetensors", {"format": "pt"})

    def quantise(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        found["quantization_config"] = {"quant_method": "fp8"}
        (folder / "config.json").write_text(json.dumps(found))

    save_composite(tmp_path / "whole", "gemma3")
    refused(cut, "is cut off: it has")
    refused(drop, r"lacks 1 tensors of its language model, such as model\.norm\.weight")
    refused(narrow, r"norm\.weight has the shape \(31,\); its model needs \(32,\)")
    refused(quantise, "is a quantised multi-modal checkpoint")
    assert not [path for path in cache.iterdir() if not path.name.endswith(".lock")]


def test_each_tensor_must_be_found_once() -> None:
    from asyncrlhf.models.text_part import find_text_part

    part = find_text_part(composite("qwen3_vl").config, "here")
    assert len({*part.names.values()}) == len(part.names) == len(part.text.state_dict())
    assert all(part.text.state_dict()[a].shape == part.whole.state_dict()[b].shape for a, b in part.names.items())
