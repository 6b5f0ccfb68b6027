"""What eviction does to the rollouts of an engine: the share kept, and how far the sampler is from the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.engines.hf.forward import Passes
from asyncrlhf.engines.hf.slots import SlotTable
from asyncrlhf.models.copies import to_device
from asyncrlhf.types import FloatArray, IntArray, Rollout, SamplingParams

PARTS = 4  # of the longest response, for the distance by position
LOW = 0.05  # the quantile of the ratios that is reported: what their lower tail is


class CacheFacts:
    """Measures rollouts; their ``measured`` values become metrics.

    A sample of them is compared with the same version over the whole text: those that one version made alone, at their
    end, and before each load one of those in flight. Truncated sampling is not compared.
    """

    def __init__(self, config: CacheConfig, longest: int, passes: Passes, sampled_ids: int | None) -> None:
        """``longest``: tokens of a response; ``sampled_ids``: ids from this one on have no probability."""
        self._config, self._longest, self._passes, self._sampled_ids = config, longest, passes, sampled_ids
        self._compared: dict[int, dict[str, float]] = {}  # of rollouts in flight

    def told(self, rollout: Rollout, sampling: SamplingParams, row: int, evicted: int, version: int) -> Rollout:
        """The finished rollout with ``cache_kept_fraction``, the share of its response that was still there at its end,
        ``cache_bytes``, the whole cache's, and what its comparison gave; a compared one also with what stayed."""
        measured = {"cache_kept_fraction": 1 - evicted / len(rollout.response_ids)}
        measured["cache_bytes"] = float(self._passes.nbytes)
        compared = self._compared.pop(rollout.rollout_id, None)
        if compared is None and self._chosen(rollout.rollout_id, sampling, rollout.policy_versions, version):
            compared = self._compare(
                rollout.prompt.token_ids, rollout.response_ids, rollout.behavior_logprobs, sampling.temperature
            )
        part = slice(first := len(rollout.prompt.token_ids), first + len(rollout.response_ids))
        stayed = self._passes.stayed(row, part) if compared and evicted else None
        return replace(rollout, measured=measured | (compared or {}), stayed=stayed)

    def before_load(self, table: SlotTable, version: int) -> None:
        """Compare the longest of the rows in flight that ``version`` made alone, whose keys are all of this version."""
        found = [
            row
            for row, request in enumerate(table.requests[: table.count])
            if request is not None
            and request.rollout_id not in self._compared
            and table.length[row] > table.prompt_length[row]
            and self._chosen(request.rollout_id, request.sampling, table.versions[row, _response(table, row)], version)
        ]
        if found:
            row = max(found, key=lambda row: int(table.length[row] - table.prompt_length[row]))
            request, part = table.requests[row], _response(table, row)
            assert request is not None
            self._compared[request.rollout_id] = self._compare(
                request.prompt_ids, table.tokens[row, part], table.logprobs[row, part], request.sampling.temperature
            )

    def forget(self, gone: set[int]) -> None:
        for rollout_id in gone & self._compared.keys():
            del self._compared[rollout_id]

    def _chosen(self, rollout_id: int, sampling: SamplingParams, versions: IntArray, version: int) -> bool:
        every = self._config.compare_every
        plain = sampling.top_p >= 1 and not sampling.top_k and not sampling.min_p and sampling.repetition_penalty == 1
        return bool(
            every and rollout_id % every == 0 and plain and sampling.temperature and (versions == version).all()
        )

    @torch.inference_mode()
    def _compare(
        self, prompt: IntArray, response: IntArray, sampled: FloatArray, temperature: float
    ) -> dict[str, float]:
        """``cache_kl``, in nats a token: the k3 estimate of KL(sampler || whole cache), also in parts of the longest
        response (``cache_kl/1`` to 4), and ``cache_ratio_low``, the 5% quantile of the ratios whole / sampler.
        ``sampled`` [L]: the response's log-probs."""
        text = np.concatenate([np.asarray(prompt, np.int64), np.asarray(response, np.int64)])
        logits = self._passes.score(text)[len(prompt) - 1 : -1, : self._sampled_ids].float() / temperature
        chosen = to_device(torch.from_numpy(text[len(prompt) :, None]), logits.device)
        whole = torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].double().cpu().numpy()
        apart = whole - sampled
        kl = np.expm1(apart) - apart
        part = np.minimum(np.arange(len(kl)) * PARTS // max(1, self._longest), PARTS - 1)
        found = {"cache_kl": float(kl.mean()), "cache_ratio_low": float(np.exp(np.quantile(apart, LOW)))}
        return found | {f"cache_kl/{i + 1}": float(kl[part == i].mean()) for i in range(PARTS) if (part == i).any()}


def _response(table: SlotTable, row: int) -> slice:
    return slice(int(table.prompt_length[row]), int(table.length[row]))


def is_separator(text: str) -> bool:
    """Whether a token's text is punctuation alone, or ends a line."""
    inside = text.strip(" ")
    return bool(inside) and ("\n" in text or all(not c.isalnum() and not c.isspace() for c in inside))
