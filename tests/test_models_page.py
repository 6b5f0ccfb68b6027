"""The committed page of models: exactly the families of the installed transformers, and rows that the code still finds.

A new transformers shows its new families as a difference; `make reference` finds their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from asyncrlhf.doctor import model_ways, models_page
from asyncrlhf.doctor.model_ways import engine_way, export_way, learner_way
from asyncrlhf.engines.hf import wall as engine_wall
from asyncrlhf.learner.step import wall as learner_wall
from asyncrlhf.models.miniature import build_miniature

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
SAMPLE = (
    "llama", "gpt2", "bloom", "gemma2", "mistral", "qwen3_moe", "gpt_oss", "deepseek_v3", "jamba", "mamba2", "opt",
    "bert", "blt", "laguna",
)  # fmt: skip


def committed() -> dict[str, str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def test_the_page_has_exactly_the_families_of_this_transformers() -> None:
    assert sorted(committed()) == models_page.families(), "make reference"
    assert f"transformers {transformers.__version__} runs" in PAGE.read_text(), "make reference"


@pytest.mark.in_turn
@pytest.mark.parametrize("family", SAMPLE)
@pytest.mark.more_but(every=5)
@pytest.mark.thorough_but(every=2)
def test_rows_are_those_that_the_code_finds(family: str) -> None:
    assert models_page.row(family).line() == committed()[family], "make reference"


def test_the_table_is_made_and_the_text_above_it_stays() -> None:
    """Of another transformers the page has the version and the rows."""
    made = models_page.page([models_page.row("llama")], PAGE.read_text().replace(transformers.__version__, "4.0.0"))
    assert made.splitlines()[:18] == PAGE.read_text().splitlines()[:18]
    assert made.endswith(f"|\n{committed()['llama']}\n") and "\n1 families. Learner: 1 packed." in made


@pytest.mark.thorough
def test_every_row_is_what_the_code_finds() -> None:
    found = models_page.page([models_page.row(family) for family in models_page.families()], PAGE.read_text())
    assert found == PAGE.read_text(), "make reference"


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Faults are planted here: no family's result may come from, or reach, another test."""
    walls = learner_wall, engine_wall
    for wall in walls:
        wall._family_ways.cache_clear()
    yield
    for wall in walls:
        wall._family_ways.cache_clear()


def small() -> transformers.PreTrainedModel:
    return build_miniature(AutoConfig.for_model("llama"))


def test_a_sequence_that_sees_the_one_before_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrlhf.learner import rank_models
    from asyncrlhf.learner.attention.attention import PackedLayout
    from asyncrlhf.learner.model.forward import PackedPolicy

    built = PackedLayout.build.__func__  # type: ignore[attr-defined]

    def as_one(cls, lengths, prompts, owners, *rest):  # type: ignore[no-untyped-def]
        whole = built(cls, lengths.sum(keepdims=True), prompts[:1] * 0, owners[:1], *rest)
        separate = built(cls, lengths, prompts, owners, *rest)
        object.__setattr__(separate, "spans", whole.spans)
        return separate

    assert learner_way(small()).name == "packed"
    monkeypatch.setattr(PackedLayout, "build", classmethod(as_one))
    way = learner_way(small())
    assert way.refused and "off the model's own pass" in way.why, (
        "the layout's borders are those of single sequences, too"
    )
    # The page compares on its own: a learner that chose wrongly is found, too.
    monkeypatch.setattr(rank_models, "learner_policy", lambda model, *_: (PackedPolicy(model), ""))
    way = learner_way(small())
    assert way.refused and "differ from those of a plain pass" in way.why


def test_gradients_of_half_the_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrlhf.learner.model import forward

    whole = forward.token_logprobs

    def halved(*given, **more):  # type: ignore[no-untyped-def]
        logprobs, entropies = whole(*given, **more)
        return logprobs / 2 + logprobs.detach() / 2, entropies

    monkeypatch.setattr(forward, "token_logprobs", halved)
    way = learner_way(small())
    assert way.refused and "gradients differ" in way.why


def test_an_engine_that_keeps_an_old_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrlhf.engines.hf import hf_engine as hf

    trained: dict[str, torch.Tensor] = {}
    assert learner_way(small(), trained).name == "packed"
    assert engine_way(small(), trained).name == "slots"
    monkeypatch.setattr(hf, "load_named_weights", lambda model, weights: None)
    way = engine_way(small(), trained)
    assert way.refused and "after new weights" in way.why


def test_a_checkpoint_without_a_tensor_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert export_way(small(), tmp_path / "whole").name == "yes"
    own = transformers.PreTrainedModel.save_pretrained

    def partly(self: transformers.PreTrainedModel, folder: Path) -> None:
        own(self, folder, state_dict={k: v for k, v in self.state_dict().items() if "layers.1.mlp.up" not in k})

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", partly)
    assert export_way(small(), tmp_path / "partly").refused


def test_figures_leave_a_sentence() -> None:
    found = model_ways.without_figures("It differs (largest difference 0.31, allowed 2.5e-4); the model (GPT-2) stays.")
    assert found == "It differs; the model (GPT-2) stays."
