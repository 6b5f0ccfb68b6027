"""Best-of-n sampling from the SFT model by the learned reward: the reference that needs no training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from chain import Base

from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.stages.answers import sample_answers, score_answers
from asyncrlhf.stages.preferences import draw_prompts

ANSWERS = 64
SIZES = (1, 2, 4, 8, 16, 32)


def best_of_n(base: Base, prompts: int) -> list[dict[str, Any]]:
    """For each n the proxy and gold reward of the best of n by the proxy, over ``prompts`` training prompts.

    Out of ANSWERS answers a prompt, by the unbiased estimator of Nakano et al. 2021 (2112.09332, appendix I); the KL to
    the SFT model is log n - (n - 1) / n nats an answer, as in Gao et al. 2022.
    """
    config = load_config([*base.common, f"model.path={base.sft_model}", *base.rewards(1.0, 0.0)])
    prepared = prepare(config)
    asked = draw_prompts(prepared.task.train_source(base.seed), prompts)
    answers = sample_answers(config, config.model, prepared.tokenizer, asked, prepared.sampling, ANSWERS)
    (scored,) = score_answers(config, answers)
    groups: dict[int, list[tuple[float, float]]] = {}
    for answer in scored:
        parts = answer.result.parts
        groups.setdefault(answer.rollout.group_id, []).append((parts["proxy"], parts["gold"]))
    rows = []
    for n in SIZES:
        means = np.mean([expected_best(np.array(sorted(group)), n) for group in groups.values()], axis=0)
        kl = math.log(n) - (n - 1) / n
        rows.append({"seed": base.seed, "n": n, "kl": kl, "proxy": float(means[0]), "gold": float(means[1])})
    return rows


def expected_best(ordered: np.ndarray, n: int) -> np.ndarray:
    """[2] proxy and gold of the best of n drawn without replacement from ``ordered`` [N, 2], which ascends in proxy."""
    total = len(ordered)
    weights = np.array([math.comb(i, n - 1) for i in range(total)], dtype=np.float64) / math.comb(total, n)
    found: np.ndarray = weights @ ordered
    return found
