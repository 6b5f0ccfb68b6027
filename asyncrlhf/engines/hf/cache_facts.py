"""What eviction does to the rollouts of an engine: the share kept, and how far the sampler is from the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.engines.hf.forward import Passes
from asyncrlhf.models.copies import to_device
from asyncrlhf.types import FloatArray, Rollout, SamplingParams

PARTS = 4  # of the longest response, for the distance by position
LOW = 0.05  # the quantile of the ratios that is reported: what their lower tail is


class CacheFacts:
    """Measures finished rollouts; their ``measured`` values become metrics."""

    def __init__(self, config: CacheConfig, longest: int, passes: Passes) -> None:
        """``longest``: tokens of a response."""
        self._config, self._longest, self._passes = config, longest, passes

    def told(
        self, rollout: Rollout, sampling: SamplingParams, evicted: int, version: int, sampled_ids: int | None
    ) -> Rollout:
        """The rollout with ``cache_kept_fraction``, the share of its response that was still there at its end, and
        ``cache_bytes``, the whole cache's. A sample of those that ``version`` made alone, without truncation, is
        compared with the same version over the whole text: ``cache_kl``, in nats a token, the k3 estimate of KL(sampler
        || whole cache), also in parts of the longest response (``cache_kl/1`` to 4), and ``cache_ratio_low``, the 5%
        quantile of the probability ratios whole / sampler."""
        length = len(rollout.response_ids)
        measured = {"cache_kept_fraction": 1 - evicted / length, "cache_bytes": float(self._passes.nbytes)}
        every = self._config.compare_every
        plain = sampling.top_p >= 1 and not sampling.top_k and not sampling.min_p
        plain = plain and sampling.repetition_penalty == 1 and sampling.temperature > 0
        if every and rollout.rollout_id % every == 0 and plain and (rollout.policy_versions == version).all():
            whole = self._whole(rollout, sampling.temperature, sampled_ids)
            apart = whole.astype(np.float64) - rollout.behavior_logprobs
            kl = np.expm1(apart) - apart
            part = np.minimum(np.arange(length) * PARTS // max(1, self._longest), PARTS - 1)
            measured |= {"cache_kl": float(kl.mean()), "cache_ratio_low": float(np.exp(np.quantile(apart, LOW)))}
            measured |= {f"cache_kl/{i + 1}": float(kl[part == i].mean()) for i in range(PARTS) if (part == i).any()}
        return replace(rollout, measured=measured)

    @torch.inference_mode()
    def _whole(self, rollout: Rollout, temperature: float, sampled_ids: int | None) -> FloatArray:
        """Log-probs [L] of the response's tokens by a pass that sees every earlier token."""
        prompt, response = rollout.prompt.token_ids, np.asarray(rollout.response_ids, np.int64)
        logits = self._passes.score(np.concatenate([np.asarray(prompt, np.int64), response]))
        logits = logits[len(prompt) - 1 : -1, :sampled_ids].float() / temperature
        chosen = to_device(torch.from_numpy(response[:, None]), logits.device)
        return torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].cpu().numpy()


def is_separator(text: str) -> bool:
    """Whether a token's text is punctuation alone, or ends a line."""
    inside = text.strip(" ")
    return bool(inside) and ("\n" in text or all(not c.isalnum() and not c.isspace() for c in inside))
