"""A world that can be enumerated: one prompt, answers of a few tokens, a tiny model, samples of any earlier policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from asyncrlhf.data.packing import pack
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import Prompt, Rollout, TrainBatch, TrainSample
from tests.unit.learner.worlds import llama

V = 5  # tokens
LENGTH = 2  # of every answer
RLOO = AlgorithmConfig("rloo", advantage="loo", anchor="self", coef="one", correction="none", aggregate="seq_sum")
SIZES = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
# Of two different tokens: one token again and again is one state to attention, however often it stands there.
PROMPT = Prompt("0", "", np.arange(2))


def policy(seed: int, spread: float = 0.3) -> LlamaForCausalLM:
    """``spread``: of the initial weights; 0.3 makes policies of two seeds differ by a nat or more."""
    return llama(seed, **SIZES, initializer_range=spread)


@dataclass(frozen=True)
class Table:
    """A policy as log-probs: of the first token [V], and of the second given the first [V, V]."""

    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float = 1.0) -> Table:
        """With the model's gradient."""
        prompt = torch.from_numpy(PROMPT.token_ids)
        ids = torch.cat((prompt.expand(V, -1), torch.arange(V)[:, None]), dim=1)
        logits = model(input_ids=ids).logits.double() / temperature
        return cls(logits[0, -2].log_softmax(-1), logits[:, -1].log_softmax(-1))

    def tokens(self) -> torch.Tensor:
        """Log-probs of both tokens of all answers, in the order of ``ANSWERS``: [V * V, 2]."""
        return torch.stack((self.first[:, None].expand(V, V), self.second), dim=-1).reshape(-1, 2)

    def sequences(self) -> torch.Tensor:
        """Probability of each answer: [V * V]."""
        return self.tokens().sum(1).exp()

    def kl(self, other: Table) -> torch.Tensor:
        """KL(self || other) of whole answers, in nats: 0-dim."""
        chances = self.sequences()
        possible = chances > 0
        return (chances * (self.tokens() - other.tokens()).sum(1))[possible].sum()


ANSWERS = np.stack(np.meshgrid(np.arange(V), np.arange(V), indexing="ij"), axis=-1).reshape(-1, LENGTH)


def nucleus(table: Table, top_p: float) -> list[list[np.ndarray]]:
    """The sets that top-p keeps before each token of each answer, in the order of ``ANSWERS``."""

    def kept(logprobs: torch.Tensor) -> np.ndarray:
        chances, order = logprobs.exp().sort(descending=True)
        before = chances.cumsum(0) - chances
        return order[before < top_p].numpy().astype(np.int32)

    first, second = kept(table.first), [kept(row) for row in table.second]
    return [[first, second[answer[0]]] for answer in ANSWERS]


def on_sets(table: Table, sets: list[list[np.ndarray]]) -> Table:
    """The policy renormalised on each token's set; -inf outside."""

    def renormalised(logprobs: torch.Tensor, kept: np.ndarray) -> torch.Tensor:
        inside = torch.zeros(V, dtype=torch.bool)
        inside[kept] = True
        return logprobs.masked_fill(~inside, -torch.inf).log_softmax(-1)

    second = [renormalised(row, sets[place * V][1]) for place, row in enumerate(table.second)]
    return Table(renormalised(table.first, sets[0][0]), torch.stack(second))


def rollout(
    index: int,
    group: int,
    answer: np.ndarray,
    logprobs: np.ndarray,
    version: int = 0,
    kept: list[np.ndarray] | None = None,
) -> Rollout:
    return Rollout(
        rollout_id=index,
        group_id=group,
        prompt=PROMPT,
        response_ids=answer,
        behavior_logprobs=logprobs.astype(np.float32),
        policy_versions=np.full(len(answer), version),
        finish_reason="stop",
        response_text="",
        generator_id="g0",
        kept_ids=None if kept is None else np.concatenate(kept),
        kept_counts=None if kept is None else np.array([len(part) for part in kept], dtype=np.int32),
    )


def enumerated(sampler: Table, rewards: np.ndarray, sets: list[list[np.ndarray]] | None = None) -> TrainBatch:
    """All answers that ``sampler`` may give, each in a group of its own, weighted so that a mean over sequences is the
    expectation over it. ``rewards`` [V * V]; ``sets``: of a sampler that truncates."""
    logprobs, chances = sampler.tokens().detach().numpy(), sampler.sequences().detach().numpy()
    possible = np.flatnonzero(chances > 0).tolist()
    return pack(
        [
            TrainSample(
                rollout(i, i, ANSWERS[i], logprobs[i], kept=None if sets is None else sets[i]),
                float(rewards[i]),
                weight=float(chances[i] * len(possible)),
            )
            for i in possible
        ]
    )


def sampled(
    sampler: Table, groups: int, size: int, draws: np.random.Generator, version: int, reward: Callable[[int], float]
) -> TrainBatch:
    """Random answers of ``sampler``; ``reward`` takes an answer's place in ``ANSWERS``."""
    logprobs, chances = sampler.tokens().detach().numpy(), sampler.sequences().detach().numpy()
    drawn = draws.choice(len(ANSWERS), size=groups * size, p=chances / chances.sum())
    return pack(
        [
            TrainSample(rollout(i, i // size, ANSWERS[answer], logprobs[answer], version), reward(answer))
            for i, answer in enumerate(drawn.tolist())
        ]
    )


def course(steps: int, rate: float, seed: int = 0, spread: float = 0.1) -> tuple[list[Table], LlamaForCausalLM]:
    """A policy before each of ``steps`` learner steps on random rewards and behind the last, and the model of that."""
    model, shadow = policy(seed, spread), policy(seed, spread)
    spec = BackendSpec(learner=LearnerConfig(learning_rate=rate), algorithm=RLOO, steps=steps)
    trained = TorchBackend(model, spec)
    draws, tables = np.random.default_rng(seed), []
    rewards = draws.uniform(0, 1, len(ANSWERS))
    for version in range(steps + 1):
        shadow.load_state_dict(trained.model.state_dict())
        with torch.no_grad():
            tables.append(Table.of(shadow))
        if version < steps:
            trained.train_step(sampled(tables[-1], 16, 4, draws, version, lambda answer: float(rewards[answer])))
    return tables, shadow


def copied(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model of the same weights for a backend, which changes the attention of the one that it is given."""
    made = policy(0)
    made.load_state_dict(model.state_dict())
    return made
