"""Several teachers: a rollout is compared with the one that its row names, or else with the mixture of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrlhf.actors.model_annotators import ReferenceSpec, ReferenceWorker, TeachersWorker
from asyncrlhf.cluster.parts import reference_spec, service_notes
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.readahead.owners import Chunk
from asyncrlhf.types import OBSERVED, FloatArray, Prompt, Rollout
from tests.numeric import assert_close


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> str:
    """The packaged model with its last layer turned to noise, so that it says other things."""
    folder, config = tmp_path_factory.mktemp("other"), ModelConfig()
    model = load_model(config)
    torch.manual_seed(0)
    for parameter in model.model.layers[-1].parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((tiny_model_path / name).read_text())
    return str(folder)


def settings(other: str, *more: str) -> list[str]:
    """The first has three times the second's weight."""
    return [
        "algorithm=distill", "++reference.teachers.whole.path=tiny", "++reference.teachers.whole.weight=3",
        f"++reference.teachers.noisy.path={other}", "++reference.teachers.noisy.weight=1", *more,
    ]  # fmt: skip


def spec_of(other: str, *more: str) -> ReferenceSpec:
    spec = reference_spec(load_config(settings(other, *more)))
    assert spec is not None
    return spec


def rollouts(**rows: object) -> list[Rollout]:
    """Of different lengths, the second token of the last one observed; each with its ``rows`` value as its teacher."""
    draws, made = np.random.default_rng(0), []
    for number, named in enumerate(rows.values()):
        prompt = Prompt("", "", draws.integers(4, 14, 4), metadata={} if named is None else {"teacher": named})
        ids, versions = draws.integers(4, 14, 3 + number), np.zeros(3 + number, np.int64)
        made.append(Rollout(number, 0, prompt, ids, np.zeros(len(ids), np.float32), versions, "stop"))
    made[-1].policy_versions[1] = OBSERVED
    return made


def logprobs(worker: ReferenceWorker | TeachersWorker, asked: list[Rollout]) -> list[FloatArray | str]:
    annotations, bundle = worker.annotate(asked)
    arrays = iter(bundle[i]["ref_logprobs"] for i in range(len(asked)))
    return [next(arrays) if a.error is None else a.error for a in annotations]


@pytest.mark.parametrize("granularity", ["rollout", "chunk"])
def test_each_row_has_its_teacher_or_the_mixture(other: str, granularity: str) -> None:
    """Against workers with one teacher each; read ahead or not, also where another teacher has read the row."""
    spec = spec_of(other, f"fusion.granularity={granularity}")
    asked = rollouts(a=None, b="whole", c="noisy", d=None)
    worker = spec.build("reference")
    assert isinstance(worker, TeachersWorker)
    chunks = [Chunk(r.rollout_id, 0, 4, [*r.prompt.token_ids.tolist(), int(r.response_ids[0])]) for r in asked]
    assert worker.prefill([], chunks).taken == (granularity == "chunk")
    whole, noisy = (logprobs(ReferenceWorker(spec.of(path)), asked) for path in ("tiny", other))
    mixed = [np.log(0.75 * np.exp(x) + 0.25 * np.exp(y)) for x, y in zip(whole, noisy, strict=True)]
    found = logprobs(worker, asked)
    for mine, expected in zip(found, [mixed[0], whole[1], noisy[2], mixed[3]], strict=True):
        assert_close(mine, expected, atol=1e-5)
    assert found[3][1] == 0.0, "an observed token"
    assert max(np.abs(x - y).max() for x, y in zip(whole, noisy, strict=True)) > 0.5
    if granularity == "chunk":
        held = [one.readings.held for one in worker._workers.values() if one.readings is not None]
        assert held == [0, 0], "a teacher forgets also the rollouts that it was not asked for"


@pytest.mark.parametrize("named", ["third", 3, {"whole": 1.0}])
def test_a_row_that_names_no_teacher_fails_alone(other: str, named: object) -> None:
    asked = rollouts(a=named, b="whole")
    worker = spec_of(other).build("reference")
    first, second = logprobs(worker, asked)
    assert first == f"Its row has teacher={named!r}; allowed: whole, noisy."
    assert_close(second, logprobs(ReferenceWorker(spec_of(other).of("tiny")), asked)[1], atol=1e-5)


def test_a_weight_of_0_leaves_a_teacher_to_the_rows_that_name_it(other: str) -> None:
    worker = spec_of(other, "reference.teachers.noisy.weight=0").build("reference")
    asked = rollouts(a=None, b="noisy")
    whole, noisy = (logprobs(ReferenceWorker(spec_of(other).of(path)), asked) for path in ("tiny", other))
    for mine, expected in zip(logprobs(worker, asked), [whole[0], noisy[1]], strict=True):
        assert_close(mine, expected, atol=1e-5)


def test_a_resumed_run_computes_again_what_other_teachers_or_weights_would_say(other: str) -> None:
    spec = spec_of(other)
    others = (spec_of(other, "reference.teachers.whole.weight=2"), spec.of("tiny"), spec.of(other))
    assert all(spec.fingerprint != one.fingerprint for one in others)
    assert spec.of("tiny").fingerprint == replace(spec, settings=replace(spec.settings, teachers={})).fingerprint


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["reference.path=tiny"], "reference.path and reference.teachers are both given; allowed: one."),
        (["reference.workers=0"], "reference.teachers has no effect with reference.workers=0"),
        (["++reference.teachers.third.weight=1"], "reference.teachers.third.path is empty"),
        (["reference.teachers.whole.weight=0", "reference.teachers.noisy.weight=0"], "are all 0; allowed: at least"),
        (["reference.teachers.whole.weight=-1"], "reference.teachers.whole.weight=-1"),
        (
            ["++reference.teachers.third=3"],
            "reference.teachers.third=3 is of the wrong kind; allowed: settings",
        ),
        (["++reference.teachers.whole.pth=x"], "reference.teachers.whole.pth is not a setting"),
        (
            ["algorithm=decoupled_grpo", "reference=service"],
            "reference.teachers.whole.path=tiny has no effect",
        ),
    ],
)
def test_nonsense_is_one_sentence(other: str, more: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings(other, *more))
    assert sentence in str(caught.value)


def test_each_teacher_must_have_the_policys_tokens(other: str) -> None:
    assert service_notes(load_config(settings(other))) == []
    sentence = r"^reference.teachers.third.path=tiny_tools has another tokenizer than model.path=tiny"
    with pytest.raises(ConfigError, match=sentence):
        service_notes(load_config(settings(other, "++reference.teachers.third.path=tiny_tools")))
