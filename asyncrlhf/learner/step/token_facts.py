"""Token-by-token records of single rollouts in a learner step: the loss's own log-probs, weights and masks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from asyncrlhf.algorithms.weights import ratio_of
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.plan import StepPlan
from asyncrlhf.learner.step.targets import correction_weight, proximal_of


@torch.no_grad()
def token_facts(plan: StepPlan, config: AlgorithmConfig, rollout_ids: Collection[int]) -> list[dict[str, Any]]:
    """One dictionary a rollout of this rank among ``rollout_ids``, after the step: columns of
    ``rollout_tokens/*.parquet``, with arrays [L] over the response's tokens, 0 (versions: -1) at observed ones.

    ``policy_logprobs`` are those of the step's last pass. ``importance_weight`` is pi_prox / mu, not cut;
    ``behavior_weight`` what the loss multiplied the token by (None where ``algorithm.correction`` is none).
    """
    batch, tokens = plan.batch, plan.host
    chosen = np.flatnonzero(np.isin(batch.rollout_ids, list(rollout_ids)))
    if not len(chosen):
        return []
    proximal = proximal_of(config, tokens)
    columns: dict[str, torch.Tensor | None] = {
        "behavior_logprobs": tokens.behavior_logprobs,
        "proximal_logprobs": proximal,
        "policy_logprobs": tokens.policy_logprobs.detach(),
        "ref_logprobs": tokens.ref_logprobs,
        "importance_weight": ratio_of(proximal - tokens.behavior_logprobs),
        "behavior_weight": None if config.correction == "none" else correction_weight(config, tokens)[0],
        "advantages": tokens.advantages,
        "loss_mask": tokens.loss_mask,
    }
    given = {name: found for name, found in columns.items() if found is not None}
    lengths = np.bincount(tokens.sequence_ids.numpy(), minlength=batch.num_sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    places = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in chosen])
    index = torch.from_numpy(places)
    table = torch.stack([found[index].float() for found in given.values()]).numpy()
    rows, start = [], 0
    for i in chosen:
        here = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
        said, stop = batch.response_mask[here], start + int(lengths[i])
        first = int(said.argmax())  # of the response, which begins with a sampled token
        laid = np.zeros((len(given), len(said)), np.float32)
        laid[:, said] = table[:, start:stop]
        row: dict[str, Any] = {name: laid[k, first:] for k, name in enumerate(given)}
        row |= {name: None for name in columns if name not in given}
        row |= {
            "rollout_id": int(batch.rollout_ids[i]),
            "group_id": int(batch.group_ids[i]),
            "reward": float(batch.rewards[i]),
            "weight": float(batch.weights[i]),
            "prompt_ids": batch.token_ids[here][:first],
            "response_ids": batch.token_ids[here][first:],
            "policy_versions": batch.policy_versions[here][first:],
            "loss_mask": row["loss_mask"] > 0,
        }
        rows.append(row)
        start = stop
    return rows
