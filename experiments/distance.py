"""What a trained policy's samples earn on the held-out prompts, and how far it went from where it started."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.tasks.task import Task
from asyncrlhf.types import GenerationRequest, Prompt, Rollout, SamplingParams

SLOTS = 512
ROWS = 512  # sequences of one forward pass


def measure(
    policy: PreTrainedModel,
    start: PreTrainedModel,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    max_completion_length: int,
) -> dict[str, float]:
    """``samples`` responses at temperature 1 to each held-out prompt: their mean reward, mean length in tokens, and
    KL(policy || start) in nats a response."""
    prompts = [prompt for prompt in task.heldout() for _ in range(samples)]
    responses = sample(policy, prompts, tokenizer.eos_token_id, max_completion_length)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = [task.reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    return {
        "reward": float(np.mean(rewards)),
        "kl": float(sequence_kl(policy, start, [p.token_ids for p in prompts], responses).mean()),
        "length": float(np.mean([len(response) for response in responses])),
    }


def sample(policy: PreTrainedModel, prompts: Sequence[Prompt], eos: int, length: int) -> list[np.ndarray]:
    """One response to each prompt; the n-th depends on n and the policy alone."""
    sampling = SamplingParams(max_completion_length=length, stop_token_ids=(eos,))
    engine = HFEngine(policy, slots=SLOTS)
    engine.submit([GenerationRequest(i, i, p, i, sampling) for i, p in enumerate(prompts)])
    found: dict[int, np.ndarray] = {}
    while engine.in_flight():
        for result in engine.step(0.0).finished:
            assert isinstance(result, Rollout), "a held-out prompt does not fit the context"
            found[result.rollout_id] = result.response_ids
    return [found[i] for i in range(len(prompts))]


@torch.no_grad()
def sequence_kl(
    policy: PreTrainedModel, start: PreTrainedModel, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
) -> torch.Tensor:
    """[N]: over each response, the sum of the exact KL(policy || start) of every token's whole distribution.

    Its mean over responses of the policy is the KL of the sequences, with less variance than that of log-ratios.
    """
    parts = []
    for first in range(0, len(prompts), ROWS):
        pairs = list(zip(prompts[first : first + ROWS], responses[first : first + ROWS], strict=True))
        width = max(len(p) + len(r) for p, r in pairs)
        ids, sampled = np.zeros((len(pairs), width), np.int64), np.zeros((len(pairs), width), np.bool_)
        for row, (prompt, response) in enumerate(pairs):
            ids[row, : len(prompt) + len(response)] = [*prompt, *response]
            sampled[row, len(prompt) - 1 : len(prompt) + len(response) - 1] = True
        # Padding stands on the right, where causal attention never sees it.
        tokens = torch.from_numpy(ids)
        log_p, log_q = (model(input_ids=tokens).logits.log_softmax(-1) for model in (policy, start))
        parts.append(((log_p.exp() * (log_p - log_q)).sum(-1) * torch.from_numpy(sampled)).sum(-1))
    return torch.cat(parts)
