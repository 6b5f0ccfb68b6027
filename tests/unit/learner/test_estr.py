"""ESTR through the backend: the entropies are those of the same pass, and each token is judged alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from asyncrlhf.types import TrainBatch
from tests import reference
from tests.numeric import assert_close
from tests.unit.learner.test_presets import preset, spans, step
from tests.unit.learner.worlds import assert_same, llama, plain_logprobs, random_batch

ESTR, TAU = preset("estr"), 1.0


def uneven() -> LlamaForCausalLM:
    """Certain of some tokens and not of others: without training a model is as uncertain of all."""
    model = llama(tie_word_embeddings=False)
    model.lm_head.weight.data *= 8.0
    return model


MODEL = uneven()


def sampled(noise: float) -> TrainBatch:
    batch = random_batch(7, 3, seed=2)
    where, draws = batch.response_mask, np.random.default_rng(2)
    with torch.no_grad():
        policy = torch.cat(plain_logprobs(MODEL, batch)).numpy()
    batch.behavior_logprobs[where] = policy + noise * draws.standard_normal(len(policy))
    return batch


def entropies(batch: TrainBatch) -> list[torch.Tensor]:
    """Of each response token of each sequence, by a pass over it alone."""
    found = []
    for s, e in spans(batch):
        with torch.no_grad():
            logits = MODEL(torch.from_numpy(batch.token_ids[s:e])[None].long()).logits[0, :-1].double()
        of_next = torch.distributions.Categorical(logits=logits).entropy()
        found.append(of_next[torch.from_numpy(batch.response_mask[s + 1 : e])])
    return found


def paper(batch: TrainBatch) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """The gradient by a padded pass and without the kernel, and which of the trained tokens stayed."""
    losses, weights, kept = [], [], []
    rewards = batch.rewards.astype(np.float64)
    mu_all = torch.from_numpy(batch.behavior_logprobs).double()
    given = zip(plain_logprobs(MODEL, batch), entropies(batch), spans(batch), strict=True)
    for i, (theta, entropy, (s, e)) in enumerate(given):
        response = torch.from_numpy(batch.response_mask[s:e])
        mask = torch.from_numpy(batch.loss_mask[s:e])[response]
        mu, theta, entropy = mu_all[s:e][response][mask], theta[mask].double(), entropy[mask]
        peers = rewards[batch.group_ids == batch.group_ids[i]]
        a = float((rewards[i] - peers.mean()) / (peers.std(ddof=1) + 1e-4))
        (keep,) = reference.estr_keep([theta.detach().numpy()], [mu.numpy()], [entropy.numpy()], TAU)
        r = (theta - mu).exp()
        objective = torch.minimum(r * a, r.clamp(0.8, 1.2) * a) * torch.from_numpy(keep)
        losses.append(-float(batch.weights[i]) * objective.sum())
        weights.append(float(mask.sum()))
        kept.append(keep)
    MODEL.zero_grad()
    (sum(losses) / sum(weights)).backward()
    return {name: p.grad.clone() for name, p in MODEL.named_parameters()}, np.concatenate(kept)


@pytest.mark.parametrize("budget", [10_000, 25])
def test_the_preset_is_the_paper(budget: int) -> None:
    """Some tokens stay and some go; neighbours in one pass, or few of them."""
    batch = sampled(noise=0.4)
    expected, kept = paper(batch)
    assert 10 <= kept.sum() <= len(kept) - 10
    certain = np.concatenate([x.numpy() for x in entropies(batch)]) < 0.2
    assert 10 <= certain.sum() <= len(certain) - 10
    gradient, metrics = step(ESTR, batch, budget, model=uneven())
    assert_same(gradient, expected, tolerance=1e-4)
    assert metrics["clip_fraction"] >= 1 - kept.mean() - 1e-6


def test_fresh_samples_train_as_without_the_gate() -> None:
    batch = sampled(noise=0.0)
    (gradient, metrics), (expected, _) = (step(x, batch, model=uneven()) for x in (ESTR, preset("grpo_mu")))
    assert_close(metrics["clip_fraction"], 0.0)
    assert_same(gradient, expected)
