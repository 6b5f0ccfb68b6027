"""Tiny models, batches and plain references that the learner's tests share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from asyncrlhf.data.packing import pack, select, sequence_lengths, share_out
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.types import OBSERVED, Prompt, Rollout, TrainBatch, TrainSample
from tests.numeric import assert_close

VOCABULARY = 17
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def llama(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    settings = SIZES | {"tie_word_embeddings": True}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


def from_config(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def share(batch: TrainBatch, rank: int, ranks: int) -> TrainBatch:
    """What the learner sends to one of its ranks."""
    return select(batch, share_out(batch.group_ids, sequence_lengths(batch), ranks)[rank])


def samples(
    groups: int = 4, size: int = 3, seed: int = 0, *, longest: int = 9, flat_groups: int = 0
) -> list[TrainSample]:
    """Ragged random rollouts; the first ``flat_groups`` groups have no reward spread."""
    draws = np.random.default_rng(seed)
    made = []
    prompts = [draws.integers(0, VOCABULARY, int(draws.integers(1, 6))) for _ in range(groups)]
    for index in range(groups * size):
        group = index // size
        length = int(draws.integers(1, longest + 1))
        prompt = Prompt(str(group), "", prompts[group])
        rollout = Rollout(
            rollout_id=index,
            group_id=group,
            prompt=prompt,
            response_ids=draws.integers(0, VOCABULARY, length),
            behavior_logprobs=draws.normal(-2.5, 0.8, length).astype(np.float32),
            policy_versions=np.sort(draws.integers(0, 4, length)),
            finish_reason="length" if draws.random() < 0.3 else "stop",
            response_text="",
            generator_id="g0",
        )
        reward = 1.0 if group < flat_groups else float(draws.normal())
        made.append(TrainSample(rollout, reward, weight=float(draws.uniform(0.5, 1.5)), masked_before_version=1))
    return made


def random_batch(groups: int = 4, size: int = 3, seed: int = 0, **options: int) -> TrainBatch:
    return pack(samples(groups, size, seed, **options))


def with_gaps(sample: TrainSample, garbage: float = 0.0) -> TrainSample:
    """The rollout with up to 6 observed tokens after sampled ones, the last included; ``garbage``: their numbers."""
    given, draws = sample.rollout, np.random.default_rng(sample.rollout.rollout_id)
    after = np.sort(draws.integers(1, len(given.response_ids) + 1, int(draws.integers(0, 7))))
    numbers = {name: getattr(given, name) for name in ("behavior_logprobs", "ref_logprobs", "values")}
    rollout = replace(
        given,
        response_ids=np.insert(given.response_ids, after, draws.integers(0, VOCABULARY, len(after))),
        policy_versions=np.insert(given.policy_versions, after, OBSERVED),
        kept_counts=None if given.kept_counts is None else np.insert(given.kept_counts, after, 0),
        **{name: np.insert(array, after, garbage) for name, array in numbers.items() if array is not None},
    )
    return replace(sample, rollout=rollout)


def backend(
    algorithm: AlgorithmConfig | None = None, learner: LearnerConfig | None = None, **options: object
) -> TorchBackend:
    """A backend whose steps do not move the weights unless ``learner`` says so: gradients can be read afterwards."""
    still = LearnerConfig(learning_rate=0.0, max_grad_norm=0.0)
    place = {name: options.pop(name) for name in ("reference", "rank", "ranks", "device") if name in options}
    model = options.pop("model", None) or llama()
    known = {"learner": learner or still, "algorithm": algorithm or AlgorithmConfig(), "steps": 100}
    return TorchBackend(model, BackendSpec(**(known | options)), **place)


def gradients(trained: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trained.model.named_parameters()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Equal up to ``tolerance`` times the largest entry of all tensors."""
    assert any(x.any() for x in b.values())
    assert_close(a, b, rtol=0.0, atol=0.0, of_largest=tolerance)


def plain_logprobs(model: PreTrainedModel, batch: TrainBatch, temperature: float = 1.0) -> list[torch.Tensor]:
    """Response log-probs of each sequence by a right-padded forward of the model, as transformers runs it."""
    lengths = np.diff(batch.cu_seqlens)
    ids = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (start, length) in enumerate(zip(batch.cu_seqlens, lengths, strict=False)):
        ids[row, :length] = torch.from_numpy(batch.token_ids[start : start + length])
        mask[row, :length] = 1
    logprobs = (model(input_ids=ids, attention_mask=mask).logits / temperature).log_softmax(-1)
    chosen = logprobs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    found = []
    for row, (start, length) in enumerate(zip(batch.cu_seqlens, lengths, strict=False)):
        where = torch.from_numpy(batch.response_mask[start + 1 : start + length])
        found.append(chosen[row, : length - 1][where])
    return found


def needs(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Which of mu, prox, ref, critic, group, ema the algorithm needs beside the policy of the pass itself."""
    a, corrected, own_loss = algorithm, algorithm.correction != "none", bool(algorithm.loss.target)
    found = {
        "mu": a.anchor in ("mu", "prox_interp") or corrected or a.gate != "none" or own_loss or a.ema_ratio_cap > 0
        or a.advantage == "vtrace" or a.lr != "none" or (a.kl != "none" and a.kl_target == "mu"),
        "prox": a.anchor == "prox" or own_loss or a.lr != "none" or a.kl == "reward" or a.corrects_values
        or (a.anchor != "ema" and (a.advantage == "vtrace" or (corrected and a.anchor == "self"))),
        "ref": a.needs_reference,
        "critic": a.needs_critic,
        "group": a.group_relative,
        "ema": a.anchor == "ema",
    }  # fmt: skip
    return frozenset(name for name, needed in found.items() if needed)
