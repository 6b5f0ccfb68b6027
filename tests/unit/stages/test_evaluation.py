"""Figures of an evaluation against enumeration, unpadded passes and counting by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.stage_config import EvaluationConfig
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model
from asyncrlhf.stages.answers import Scored
from asyncrlhf.stages.evaluation import evaluate, pass_at, win_rate
from asyncrlhf.stages.statistics import kl_figures, perplexity, response_logprobs
from asyncrlhf.types import Annotation, Prompt, Rollout
from tests.numeric import assert_close


def rollout(group: int, prompt: list[int], response: list[int], text: str = "") -> Rollout:
    zeros = np.zeros(len(response))
    asked = Prompt(str(group), str(group), np.array(prompt, dtype=np.int64))
    ids = np.array(response, dtype=np.int64)
    return Rollout(0, group, asked, ids, zeros.astype(np.float32), zeros.astype(np.int64), "stop", text, "g")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_model(ModelConfig())


def test_logprobs_are_those_of_each_text_alone(model: torch.nn.Module) -> None:
    rng = np.random.default_rng(0)
    shapes = [(1, 1), (7, 3), (3, 9), (12, 1), (2, 0)]
    rollouts = [
        rollout(i, rng.integers(4, 19, p).tolist(), rng.integers(4, 19, n).tolist()) for i, (p, n) in enumerate(shapes)
    ]
    cold, warm = response_logprobs(model, rollouts, [1.0, 0.5])
    for r, one, half in zip(rollouts, cold, warm, strict=True):
        text = torch.from_numpy(np.concatenate([r.prompt.token_ids, r.response_ids]))
        with torch.no_grad():
            logits = model(text[None]).logits[0].double()
        begin = len(r.prompt.token_ids)
        for found, temperature in ((one, 1.0), (half, 0.5)):
            table = torch.log_softmax(logits / temperature, -1)
            wanted = [float(table[t - 1, text[t]]) for t in range(begin, len(text))]
            assert_close(found, wanted, atol=2e-5)
            assert len(found) == len(r.response_ids)


def test_perplexity_is_that_of_the_models_own_loss(model: torch.nn.Module) -> None:
    """transformers' loss over the response tokens of one text, and token-weighted over two texts."""
    rollouts = [rollout(0, [1, 5, 6], [7, 8, 2]), rollout(1, [1, 9], [10, 2])]
    losses, counts = [], []
    for r in rollouts:
        text = torch.from_numpy(np.concatenate([r.prompt.token_ids, r.response_ids]))[None]
        labels = text.clone()
        labels[:, : len(r.prompt.token_ids)] = -100
        with torch.no_grad():
            losses.append(float(model(text, labels=labels).loss))
        counts.append(len(r.response_ids))
    (logprobs,) = response_logprobs(model, rollouts, [1.0])
    assert_close(perplexity(logprobs), np.exp(np.average(losses, weights=counts)), rtol=1e-4)
    assert perplexity([np.zeros(0, np.float32)]) is None


@pytest.mark.in_turn
@pytest.mark.more
def test_kl_of_sampled_answers_is_the_exact_one() -> None:
    """Two tokens an answer, each drawn from a known distribution: the KL of a sequence is the sum of two exact KLs."""
    rng = np.random.default_rng(4)
    policy, reference = rng.dirichlet(np.ones(9), 2), rng.dirichlet(np.ones(9) * 3, 2)
    exact = float((policy * np.log(policy / reference)).sum())
    n = 12_000
    draws = np.stack([rng.choice(9, size=n, p=policy[t]) for t in range(2)], 1)
    places = np.arange(2)
    ours = [np.log(policy[places, d]).astype(np.float32) for d in draws]
    theirs = [np.log(reference[places, d]).astype(np.float32) for d in draws]
    found = kl_figures(ours, theirs, list(range(n)))
    for estimator in ("k1", "k3"):
        mean, error = found[f"{estimator}_sequence"], found[f"{estimator}_sequence_standard_error"]
        assert mean is not None and error is not None and 0 < error < 0.05
        assert abs(mean - exact) < 4 * error, (estimator, mean, exact, error)
        assert_close(found[f"{estimator}_token"], mean / 2)
    # Answers of one prompt hang together: the same values in 100 prompts are a wider error of the same mean.
    fewer = kl_figures(ours[:200] * 50, theirs[:200] * 50, list(range(200)) * 50)
    assert_close(
        fewer["k1_sequence_standard_error"],
        kl_figures(ours[:200], theirs[:200], list(range(200)))["k1_sequence_standard_error"],
    )


def test_kl_of_a_model_from_itself_is_nothing() -> None:
    same = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)]
    figures = kl_figures(same, same, [0, 1])
    assert set(figures.values()) == {0.0}
    assert set(kl_figures([], [], []).values()) == {None}


def scored(group: int, reward: float, text: str) -> Scored:
    return Scored(rollout(group, [1], [2], text), Annotation(0, reward))


def test_win_rate_by_hand() -> None:
    ours = [scored(0, 1.0, "a"), scored(0, 3.0, "b"), scored(1, 0.5, "c"), scored(2, 9.0, "only mine")]
    theirs = [scored(0, 2.0, "d"), scored(0, 1.0, "e"), scored(1, 0.5000001, "c"), scored(3, 9.0, "only theirs")]
    found = win_rate(ours, theirs)
    # Prompt 0: 1 loses to 2 and ties with 1, 3 wins twice; prompt 1: the same text. Prompts 2 and 3 met nobody.
    assert_close(found["win_rate"], ((0 + 0.5 + 1 + 1) / 4 + 0.5) / 2)
    assert found["win_rate_prompts"] == 2
    assert_close(found["tie_rate"], 2 / 5)
    assert_close(found["win_rate_standard_error"], np.std([0.625, 0.5], ddof=1) / np.sqrt(2))
    assert_close(found["against_reward_mean"], (2.0 + 1.0 + 0.5000001 + 9.0) / 4)
    assert win_rate(ours, [])["win_rate"] is None
    turned = win_rate(theirs, ours)
    assert_close(turned["win_rate"], 1 - found["win_rate"])


SMALL = RunConfig(runtime="local", task=replace(RunConfig().task, digits=1))


def test_a_model_against_itself_and_against_the_answers() -> None:
    """The same draws on both sides: every answer meets its copy. Greedy answers win half of what is right."""
    sampled = EvaluationConfig(temperature=0.7, num_generations=3, against="tiny", reference="tiny")
    found = evaluate(replace(SMALL, evaluation=sampled))
    assert found["answers"] == 3 * found["prompts"] == 33 and found["failed"] == 0
    assert found["reward_mean"] == found["against_reward_mean"]
    assert_close(found["win_rate"], 0.5)
    assert found["kl"]["k1_sequence"] == 0.0 and found["kl"]["k3_token"] == 0.0 and found["perplexity"] > 1
    assert [s["response"] for s in found["samples"]] == [s["against_response"] for s in found["samples"]]
    assert len({s["response"] for s in found["samples"]}) > 5
    again = evaluate(replace(SMALL, evaluation=sampled))
    assert again == found
    greedy = evaluate(replace(SMALL, evaluation=EvaluationConfig(against="answers")))
    assert greedy["against_reward_mean"] == 1.0
    assert_close(greedy["win_rate"], greedy["reward_mean"] / 2)
    assert all(s["against_response"] == s["answer"] for s in greedy["samples"])


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained model whose tokenizer gives the same characters other ids."""
    tokenizer = load_tokenizer(ModelConfig())
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    letters = {name: number for name, number in state["model"]["vocab"].items() if number > 3}
    turned = dict(zip(letters, reversed(letters.values()), strict=True))
    state["model"]["vocab"] |= turned
    own = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        **{f"{kind}_token": getattr(tokenizer, f"{kind}_token") for kind in ("bos", "eos", "pad", "unk")},
    )
    torch.manual_seed(0)
    shape = load_model(ModelConfig()).config
    folder = tmp_path_factory.mktemp("stranger")
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    own.save_pretrained(folder)
    return str(folder)


def test_an_opponent_with_other_tokens_is_read_in_its_own(stranger: str) -> None:
    """Its answers are scored as text: the reference of another vocabulary is refused, the opponent is not."""
    assert load_tokenizer(ModelConfig(path=stranger))("1").input_ids != load_tokenizer(ModelConfig())("1").input_ids
    settings = EvaluationConfig(temperature=1.0, num_generations=4, against=stranger)
    found = evaluate(replace(SMALL, evaluation=settings))
    assert found["win_rate"] > 0.5 and found["win_rate_prompts"] == found["prompts"]
    answers = [s["against_response"] for s in found["samples"]]
    assert len(set(answers)) > 20 and all(set(a) <= set("0123456789+-*= .") for a in answers), answers
    graded = [float(s["against_response"].strip() == s["answer"]) for s in found["samples"]]
    assert [s["against_reward"] for s in found["samples"]] == graded
    with pytest.raises(ConfigError, match=r"has other tokens than model\.path=tiny"):
        evaluate(replace(SMALL, evaluation=EvaluationConfig(reference=stranger)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"against": "./nowhere"}, ["evaluation.against=./nowhere does not exist"]),
        ({"reference": "./nowhere"}, ["evaluation.reference=./nowhere does not exist"]),
    ],
)
def test_a_model_that_is_not_there(settings: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate(replace(SMALL, evaluation=EvaluationConfig(**settings)))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_greedy_answers_are_all_the_same() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.num_generations=2 greedy answers"):
        EvaluationConfig(num_generations=2)


def test_pass_at_k_is_the_share_of_draws_of_k_that_hold_a_right_answer() -> None:
    rewards = {0: [1.0, 0.0, 0.0, 1.0], 1: [0.0, 0.5, 0.0, 0.0], 2: [1.0, 1.0, 0.0]}
    scored = [Scored(rollout(g, [1], [2]), Annotation(0, r)) for g, given in rewards.items() for r in given]
    found = pass_at([1, 2, 4], 1.0, scored)
    for k, groups in ((1, [0, 1, 2]), (2, [0, 1, 2]), (4, [0, 1])):
        draws = {g: [max(drawn) >= 1.0 for drawn in itertools.combinations(rewards[g], k)] for g in groups}
        assert_close(found[f"pass_at_{k}"], float(np.mean([np.mean(draws[g]) for g in groups])))
    assert found["pass_at_2_standard_error"] > 0
    assert pass_at([1], 0.5, scored)["pass_at_1"] > found["pass_at_1"]


def test_several_sets_are_evaluated_with_their_own_samples(tmp_path: Path) -> None:
    rows = [{"prompt": f"{20 + i}+{31 + i}=", "answer": 51 + 2 * i} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    sets = {"own": {"path": str(tmp_path / "rows.jsonl")}, "long": {"digits": 2, "heldout_size": 3}}
    settings = EvaluationConfig(temperature=1.0, num_generations=4, pass_k=[1, 4], sets=sets)
    found = evaluate(replace(SMALL, evaluation=settings))
    own, long = found["sets"]["own"], found["sets"]["long"]
    assert (own["prompts"], long["prompts"]) == (5, 3) and found["prompts"] == 11
    assert {s["prompt"] for s in own["samples"]} == {row["prompt"] for row in rows} and len(own["samples"]) == 20
    graded = [s["reward"] for s in own["samples"]]
    assert graded == [float(s["response"].strip() == s["answer"]) for s in own["samples"]]
    assert_close(own["pass_at_1"], float(np.mean(graded)))
    assert 0 < own["pass_at_1"] <= own["pass_at_4"] <= 1
    sets["own"]["splitt"] = "test"
    with pytest.raises(ConfigError, match=r"evaluation.sets.own.splitt is not a setting"):
        evaluate(replace(SMALL, evaluation=settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pass_k": [4]}, "pass_k=4 needs as many answers"),
        ({"sets": ["a"]}, "does not map names to data"),
    ],
)
def test_settings_of_sets_and_pass_at_k(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvaluationConfig(**settings)
