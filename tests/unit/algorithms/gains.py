"""Advantages twice: by our functions, and by the papers' formulas on each sequence's trained tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrlhf.algorithms import advantages
from asyncrlhf.algorithms.masked import masked_values, moments, segment_sum, whiten
from tests import reference
from tests.reference import Batch
from tests.unit.algorithms.batches import RaggedBatch


class Gain(NamedTuple):
    """An advantage [T] by our functions, and the same for each trained sequence by the paper's formula."""

    ours: Callable[[RaggedBatch], Tensor]
    paper: Callable[[RaggedBatch], Batch]


def _per_group(paper: Callable[[NDArray[np.float64]], Any]) -> Callable[[RaggedBatch], Batch]:
    def theirs(b: RaggedBatch) -> Batch:
        found = np.zeros(b.num_sequences)
        for group in np.unique(b.group_ids):
            members = b.group_ids == group
            found[members] = paper(b.rewards[members])
        return _on_tokens(b, found)

    return theirs


def _on_tokens(b: RaggedBatch, per_sequence: NDArray[np.float64]) -> Batch:
    return [np.full(len(s), per_sequence[i]) for i, s in zip(b.trained, b.split(b.theta), strict=True)]


def _grouped(ours: Callable[..., Tensor], paper: Callable[[NDArray[np.float64]], Any], **options: float) -> Gain:
    def mine(b: RaggedBatch) -> Tensor:
        per_sequence = ours(torch.from_numpy(b.rewards), torch.from_numpy(b.group_ids), **options)
        return advantages.broadcast(per_sequence, b.tensors()[1])

    return Gain(mine, _per_group(paper))


def _terminal(b: RaggedBatch) -> Batch:
    """The reward on a sequence's last trained token."""
    return [np.append(np.zeros(len(s) - 1), b.rewards[i]) for i, s in zip(b.trained, b.split(b.theta), strict=True)]


def _gae(b: RaggedBatch) -> Tensor:
    mask, ids = b.tensors()
    rewards = advantages.terminal_rewards(torch.from_numpy(b.rewards), mask, ids)
    return advantages.gae(rewards, torch.from_numpy(b.values), mask, ids, gamma=0.9, lam=0.8)[0]


def _gae_paper(b: RaggedBatch) -> Batch:
    pairs = zip(_terminal(b), b.split(b.values), strict=True)
    return [reference.gae(r, v, 0.9, 0.8)[0] for r, v in pairs]


def vtrace(target: str) -> Gain:
    def ours(b: RaggedBatch) -> Tensor:
        mask, ids = b.tensors()
        rewards = advantages.terminal_rewards(torch.from_numpy(b.rewards), mask, ids)
        drift = torch.from_numpy(getattr(b, target)) - torch.from_numpy(b.mu)
        values = torch.from_numpy(b.values)
        return advantages.vtrace(rewards, values, drift, mask, ids, gamma=0.9, lam=0.8, rho_bar=1.2, c_bar=1.0)[0]

    def paper(b: RaggedBatch) -> Batch:
        ratios = reference.behavior_weights(b.split(getattr(b, target)), b.split(b.mu))
        triples = zip(_terminal(b), b.split(b.values), ratios, strict=True)
        return [reference.vtrace(r, v, ratio, 0.9, 0.8, (1.2, 1.0))[0] for r, v, ratio in triples]

    return Gain(ours, paper)


def _opob(b: RaggedBatch) -> Tensor:
    mask, ids = b.tensors()
    theta, drift = torch.from_numpy(b.theta), torch.from_numpy(b.prox) - torch.from_numpy(b.mu)
    norms = advantages.score_norms(theta, torch.from_numpy(b.collision), mask, ids, b.num_sequences)
    logs = segment_sum(masked_values(drift, mask), ids, b.num_sequences).clamp(max=np.log(1.5))
    rewards, group_ids = torch.from_numpy(b.rewards), torch.from_numpy(b.group_ids)
    return advantages.broadcast(advantages.opob(rewards, group_ids, log_weights=logs, score_norms=norms), ids)


def _opob_paper(b: RaggedBatch) -> Batch:
    weights = np.array([np.exp((p - m).sum()) for p, m in zip(b.split_all(b.prox), b.split_all(b.mu), strict=True)])
    policy = [np.exp(s) for s in b.split_all(b.theta)]
    norms = np.array([(1 - 2 * p + c).sum() for p, c in zip(policy, b.split_all(b.collision), strict=True)])
    found = np.zeros(b.num_sequences)
    for group in np.unique(b.group_ids):
        m = b.group_ids == group
        if norms[m].any():
            found[m] = b.rewards[m] - reference.opob_baseline(b.rewards[m], np.minimum(weights[m], 1.5), norms[m])
    return _on_tokens(b, found)


def _centred(b: RaggedBatch) -> Tensor:
    rewards = torch.from_numpy(b.rewards)
    total = moments(rewards, torch.ones(len(rewards), dtype=torch.bool))
    return advantages.broadcast(advantages.batch_mean(rewards, total), b.tensors()[1])


def _whitened(b: RaggedBatch) -> Tensor:
    mask, ids = b.tensors()
    return whiten(advantages.broadcast(torch.from_numpy(b.rewards), ids), mask)


def _whitened_paper(b: RaggedBatch) -> Batch:
    tokens = np.concatenate(raw := _on_tokens(b, b.rewards))
    spread = np.sqrt((tokens.var(ddof=1) if len(tokens) > 1 else 0.0) + 1e-8)
    return [(s - tokens.mean()) / spread for s in raw]


GIVEN = Gain(lambda b: torch.from_numpy(b.token_advantages), lambda b: b.split(b.token_advantages))
RAW = _grouped(advantages.raw, lambda r: r)
LOO = _grouped(advantages.loo, reference.loo_advantages)
MEAN = _grouped(advantages.group_mean, lambda r: r - r.mean())
SHIFTED = _grouped(advantages.group_mean, lambda r: r - (r.mean() - 0.1), shift=-0.1)
NORM = _grouped(advantages.group_norm, lambda r: reference.grpo_advantages(r, 1e-4), eps=1e-4)
SHARE = _grouped(advantages.mean_norm, reference.maxrl_advantages)
GAE, WHITENED, OPOB = Gain(_gae, _gae_paper), Gain(_whitened, _whitened_paper), Gain(_opob, _opob_paper)
CENTRED = Gain(_centred, lambda b: _on_tokens(b, b.rewards - b.rewards.mean()))
