"""``algorithm.credit=turn`` through whole learner steps: a world of two turns, all of whose episodes are enumerated.

Turn one has one or two tokens, then the world answers with a token, then turn two has one or two tokens. An expectation
over the sampler is one batch of all episodes, each weighted by its chance.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from asyncrlhf.algorithms.advantages import gae, vtrace
from asyncrlhf.config.compose import load_config
from asyncrlhf.data.packing import empty_batch, pack, select
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.step.plan import plan_step
from asyncrlhf.learner.step.segments import segment_gae
from asyncrlhf.learner.step.targets import set_targets
from asyncrlhf.learner.step.without_gradient import zero_gradient_sequences
from asyncrlhf.turns import Turn
from asyncrlhf.types import OBSERVED, Rollout, TrainBatch, TrainSample
from tests.numeric import FLOAT32, assert_close
from tests.unit.learner.bandit import PROMPT, V, copied, course, policy
from tests.unit.learner.worlds import backend, gradients, plain_logprobs, samples, share

LAG = 4
EXACT = 1e-4  # of the largest entry: the learner computes in float32. The faults move it by 0.05 and more
REINFORCE: dict[str, Any] = {"anchor": "self", "coef": "one", "correction": "none", "aggregate": "seq_sum"}
PLAIN = AlgorithmConfig("reinforce", advantage="raw", credit="turn", **REINFORCE)
UNCUT = {"correction": "truncate", "correction_level": "prod", "correction_high": 1e6}
BETA = 0.5


@dataclasses.dataclass(frozen=True)
class Episode:
    turns: tuple[tuple[int, ...], ...]
    rewards: tuple[float, ...]  # of each turn

    @property
    def ids(self) -> list[int]:
        """Of the response; the token between the turns is the world's."""
        first, *rest = self.turns
        return [*first, *((sum(first) + 1) % V, *rest[0])] if rest else [*first]

    @property
    def spans(self) -> list[tuple[int, int]]:
        first = len(self.turns[0])
        return [(0, first), (first + 1, len(self.ids))][: len(self.turns)]

    def returns(self, gamma: float) -> list[float]:
        """G_k = sum over j >= k of gamma^(j - k) r_j."""
        count = len(self.rewards)
        return [sum(gamma ** (j - k) * self.rewards[j] for j in range(k, count)) for k in range(count)]

    def prefix(self, place: int) -> tuple[int, ...]:
        return tuple(self.ids[:place])


@cache
def episodes(ragged: bool = False) -> tuple[Episode, ...]:
    """All of them. With ``ragged`` a first turn of token 0 ends the episode."""
    draws = np.random.default_rng(3)
    first = [(a,) for a in range(V - 1)] + [(V - 1, b) for b in range(V)]
    second = [(0, d) for d in range(V)] + [(c,) for c in range(1, V)]
    found = []
    for begun in first:
        earned = float(draws.normal())
        for ended in [()] if ragged and begun == (0,) else second:
            turns, rewards = ((begun, ended), (earned, float(draws.normal()))) if ended else ((begun,), (earned,))
            found.append(Episode(turns, rewards))
    return tuple(found)


@cache
def policies() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The sampler, LAG learner steps old, and the present model."""
    with torch.enable_grad():  # the first caller may be in no_grad
        return policy(0, 0.1), course(LAG, rate=2e-2)[1]


def sampler(lag: int) -> LlamaForCausalLM:
    return policies()[1 if lag == 0 else 0]


def row(index: int, group: int, episode: Episode, logprobs: np.ndarray | None = None, **more: Any) -> Rollout:
    length = len(episode.ids)
    versions, behavior = np.full(length, OBSERVED), np.zeros(length, np.float32)
    for first, end in episode.spans:
        versions[first:end] = 0
    if logprobs is not None:
        behavior[versions == 0] = logprobs
    # The last turn's reward is what is left of the episode's.
    given = [*episode.rewards[:-1], None]
    turns = tuple(Turn(*span, reward=earned) for span, earned in zip(episode.spans, given, strict=True))
    ids = np.array(episode.ids)
    return Rollout(index, group, PROMPT, ids, behavior, versions, "stop", "", "g0", turns=turns, **more)


def logprobs_of(model: LlamaForCausalLM, ragged: bool = False) -> list[torch.Tensor]:
    """Of the sampled tokens of each episode, by a padded pass of transformers."""
    rows = [row(i, i, episode) for i, episode in enumerate(episodes(ragged))]
    return [found.double() for found in plain_logprobs(model, pack([TrainSample(r, 0.0) for r in rows]))]


@cache
def chances(lag: int, ragged: bool = False) -> np.ndarray:
    with torch.no_grad():
        return np.array([float(found.sum().exp()) for found in logprobs_of(copied(sampler(lag)), ragged)])


def score(episode: Episode) -> float:
    return sum(episode.rewards)


def enumerated(lag: int, ragged: bool = False, values: list[np.ndarray] | None = None) -> TrainBatch:
    with torch.no_grad():
        behavior = [found.numpy() for found in logprobs_of(copied(sampler(lag)), ragged)]
    share_of, every = chances(lag, ragged), episodes(ragged)
    more: list[dict[str, Any]] = [{}] * len(every)
    if values is not None:
        more = [{"values": found.astype(np.float32), "critic_version": 0} for found in values]
    given = [
        TrainSample(row(i, i, episode, behavior[i], **more[i]), score(episode), weight=float(share_of[i] * len(every)))
        for i, episode in enumerate(every)
    ]
    return pack(given, turns=True)


def pairs(lag: int, ragged: bool = False) -> TrainBatch:
    """All pairs of episodes, each a group."""
    with torch.no_grad():
        behavior = [found.numpy() for found in logprobs_of(copied(sampler(lag)), ragged)]
    every, share_of = episodes(ragged), chances(lag, ragged)
    count, given = len(every), []
    rows = count * (count + 1)
    for i in range(count):
        for j in range(i, count):
            weight = (1 if i == j else 2) * share_of[i] * share_of[j] * rows / 2
            for k in (i, j):
                rollout = row(len(given), i * count + j, every[k], behavior[k])
                given.append(TrainSample(rollout, score(every[k]), weight=float(weight)))
    return pack(given, turns=True)


def found(algorithm: AlgorithmConfig, batch: TrainBatch, **options: Any) -> torch.Tensor:
    trained = backend(algorithm, model=copied(policies()[1]), **options)
    trained.policy_version = LAG
    trained.train_step(batch)
    return torch.cat([gradient.flatten() for gradient in gradients(trained).values()]).double()


def gradient_of(model: LlamaForCausalLM, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()


def truth(ragged: bool = False, kl: float = 0.0) -> torch.Tensor:
    """The gradient of -E_pi[R] + kl KL(pi || ref), knowing nothing of turns."""
    model = copied(policies()[1])
    steps = logprobs_of(model, ragged)
    with torch.no_grad():
        ref = logprobs_of(policy(100, 0.1), ragged)
    loss = torch.zeros((), dtype=torch.float64)
    for episode, own, other in zip(episodes(ragged), steps, ref, strict=True):
        loss = loss - own.sum().exp() * (score(episode) - kl * (own - other).sum())
    return gradient_of(model, loss)


def truth_by_turns(gamma: float, ragged: bool = False) -> torch.Tensor:
    """-sum_k E_pi[G_k grad log pi(turn k)]."""
    model, loss = copied(policies()[1]), torch.zeros((), dtype=torch.float64)
    for episode, own in zip(episodes(ragged), logprobs_of(model, ragged), strict=True):
        chance, start = own.sum().exp().detach(), 0
        for turn, gain in zip(episode.turns, episode.returns(gamma), strict=True):
            loss = loss - chance * gain * own[start : start + len(turn)].sum()
            start += len(turn)
    return gradient_of(model, loss)


def assert_exact(gradient: torch.Tensor, exact: torch.Tensor) -> None:
    assert_close(gradient, exact, rtol=0.0, atol=0.0, of_largest=EXACT)


def corrected(algorithm: AlgorithmConfig, lag: int, **more: Any) -> AlgorithmConfig:
    """Under uncut weights of whole episodes, if the samples are old."""
    return dataclasses.replace(algorithm, **(UNCUT if lag else {}), **more)


# --- without a critic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, LAG])
@pytest.mark.parametrize("ragged", [False, True])
def test_without_a_discount_the_expected_gradient_is_that_of_the_episodes_reward(ragged: bool, lag: int) -> None:
    batch = enumerated(lag, ragged)
    assert_exact(found(corrected(PLAIN, lag), batch), truth(ragged))
    assert_exact(found(corrected(PLAIN, lag, credit="episode"), batch), truth(ragged))


@pytest.mark.parametrize("lag", [0, LAG])
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_a_discount_is_one_of_turns(gamma: float, lag: int) -> None:
    assert_exact(found(corrected(PLAIN, lag, gamma=gamma), enumerated(lag)), truth_by_turns(gamma))


CORRECTIONS: dict[str, tuple[dict[str, Any], Any]] = {  # settings, and the weights of an episode's tokens by hand
    "none": ({}, np.ones_like),
    "token, truncated at 2": ({"correction": "truncate", "correction_high": 2.0}, lambda r: np.minimum(r, 2.0)),
    "token, masked over 1.5": ({"correction": "mask", "correction_high": 1.5}, lambda r: np.where(r > 1.5, 0.0, r)),
    "prod, truncated at 1": (UNCUT | {"correction_high": 1.0}, lambda r: np.full_like(r, min(r.prod(), 1.0))),
    "ratio to mu": ({"anchor": "mu", "coef": "cap", "cap_high": 1e6}, lambda r: r),
    "geo ratio to mu": (
        {"anchor": "mu", "coef": "cap", "cap_high": 1e6, "level": "geo"},
        lambda r: np.full_like(r, r.prod() ** (1 / len(r))),
    ),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_cut_correction_weighs_what_the_turns_earned(name: str) -> None:
    """-E_mu[sum_t w_t G_k(t) grad log pi_t], as biased as the weights are; observed tokens count in no mean."""
    settings, weights = CORRECTIONS[name]
    model, loss = copied(policies()[1]), torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        old = logprobs_of(copied(sampler(LAG)))
    for episode, own, mu, chance in zip(episodes(), logprobs_of(model), old, chances(LAG), strict=True):
        weight = torch.from_numpy(weights((own.detach() - mu).exp().numpy()))
        gains = np.repeat(episode.returns(0.5), [len(turn) for turn in episode.turns])
        loss = loss - chance * (weight * torch.from_numpy(gains) * own).sum()
    algorithm = dataclasses.replace(PLAIN, gamma=0.5, **settings)
    assert_exact(found(algorithm, enumerated(LAG)), gradient_of(model, loss))


@pytest.mark.parametrize("lag", [0, LAG])
def test_a_kl_in_the_reward_counts_in_the_turn_of_its_token(lag: int) -> None:
    algorithm = corrected(PLAIN, lag, kl="reward", beta=BETA)
    assert_exact(found(algorithm, enumerated(lag), reference=policy(100, 0.1)), truth(kl=BETA))


@pytest.mark.parametrize("lag", [0, LAG])
@pytest.mark.parametrize("ragged", [False, True])
def test_leave_one_out_over_turns_is_unbiased_also_where_a_sibling_has_fewer(ragged: bool, lag: int) -> None:
    algorithm = corrected(PLAIN, lag, advantage="loo", gamma=0.5)
    assert_exact(found(algorithm, pairs(lag, ragged)), truth_by_turns(0.5, ragged))


def with_turns(seed: int = 0) -> list[TrainSample]:
    """Ragged groups of ragged episodes: one to four turns, some without a token that trains, some without a reward."""
    draws, given = np.random.default_rng(seed), []
    for sample in samples(4, 4, seed, longest=12):
        sizes = draws.integers(1, 4, int(draws.integers(1, 5)))
        versions: list[int] = []
        turns = []
        for number, size in enumerate(sizes):
            start = len(versions) + (int(draws.integers(0, 3)) if number else 0)
            versions += [OBSERVED] * (start - len(versions)) + [int(draws.integers(0, 3))] * int(size)
            turns.append(
                Turn(start, len(versions), reward=[None, float(draws.normal())][int(draws.integers(0, 4) > 0)])
            )
        length = len(versions)
        rollout = dataclasses.replace(
            sample.rollout,
            response_ids=draws.integers(0, V, length),
            behavior_logprobs=np.where(np.array(versions) < 0, 0, draws.normal(-2, 0.3, length)).astype(np.float32),
            policy_versions=np.array(versions),
            turns=tuple(turns),
        )
        given.append(dataclasses.replace(sample, rollout=rollout))
    return given[:-1]  # the last group has lost a sibling


def rewards_of(sample: TrainSample) -> list[float]:
    """As NumPy: the turns' own, and on the last one what is left of the score."""
    earned = [turn.reward or 0.0 for turn in sample.rollout.turns]
    earned[-1] += sample.reward - sum(earned)
    return earned


RULES: dict[str, Any] = {
    "raw": lambda own, all_: own,
    "group_mean": lambda own, all_: own - np.mean(all_) if len(all_) > 1 else 0.0,
    "loo": lambda own, all_: own - (np.sum(all_) - own) / (len(all_) - 1) if len(all_) > 1 else own,
    "group_norm": lambda own, all_: (own - np.mean(all_)) / (np.std(all_, ddof=1) + 1e-4) if len(all_) > 1 else 0.0,
    "mean_norm": lambda own, all_: own / np.mean(all_) - 1 if np.mean(all_) > 0 else 0.0,
    "vstar": lambda own, all_: own - np.log(np.mean(np.exp(all_))),
}


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("rule", RULES)
def test_advantages_are_those_of_the_same_turn_of_the_siblings(rule: str, gamma: float) -> None:
    given, config = with_turns(), AlgorithmConfig(advantage=rule, credit="turn", gamma=gamma)
    gains: dict[tuple[int, int, int], float] = {}  # by group, turn and rollout
    for sample in given:
        earned = rewards_of(sample)
        for k in range(len(earned)):
            gain = sum(gamma ** (j - k) * earned[j] for j in range(k, len(earned)))
            gains[sample.rollout.group_id, k, sample.rollout.rollout_id] = gain
    alone = 0
    plan = plan_step(pack(given, turns=True), config, 10**6, torch.device("cpu"))
    set_targets(plan.tokens, config, lambda total: total)
    for index, rollout_id in enumerate(plan.batch.rollout_ids.tolist()):
        rollout, wanted = given[rollout_id].rollout, []
        for k, turn in enumerate(rollout.turns):
            peers = [gain for (group, turn_of, _), gain in gains.items() if (group, turn_of) == (rollout.group_id, k)]
            alone += len(peers) == 1
            wanted += [RULES[rule](gains[rollout.group_id, k, rollout_id], np.array(peers))] * (turn.end - turn.start)
        here = plan.tokens.sequence_ids == index
        expected = np.where(plan.tokens.loss_mask[here].numpy(), wanted, 0.0)
        assert_close(plan.tokens.advantages[here].numpy(), expected, atol=1e-5, rtol=1e-4)
    assert alone, "a turn that no sibling has"


def test_whitened_returns_are_those_of_turns() -> None:
    config = AlgorithmConfig(advantage="whiten", credit="turn", gamma=0.7)
    given = with_turns()
    plan = plan_step(pack(given, turns=True), config, 10**6, torch.device("cpu"))
    set_targets(plan.tokens, config, lambda total: total)
    flat = []
    for rollout_id in plan.batch.rollout_ids.tolist():
        earned = rewards_of(given[rollout_id])
        for k, turn in enumerate(given[rollout_id].rollout.turns):
            gain = sum(0.7 ** (j - k) * earned[j] for j in range(k, len(earned)))
            flat += [gain] * (turn.end - turn.start)
    mask = plan.tokens.loss_mask.numpy()
    gains = np.array(flat)
    expected = np.where(mask, (gains - gains[mask].mean()) / gains[mask].std(ddof=1), 0.0)
    assert_close(plan.tokens.advantages.numpy(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("advantage", ["raw", "group_mean", "loo", "group_norm", "mean_norm", "vstar"])
def test_one_turn_is_one_answer_bit_for_bit(advantage: str) -> None:
    """Also where the environment gave the whole reward as that turn's."""
    ends = []
    for credit in ("episode", "turn"):
        config, given = AlgorithmConfig(advantage=advantage, credit=credit), samples(flat_groups=1)
        for i in range(0, len(given), 2):
            whole = (Turn(0, len(given[i].rollout.response_ids), reward=given[i].reward / 3),)
            given[i] = dataclasses.replace(given[i], rollout=dataclasses.replace(given[i].rollout, turns=whole))
        batch = pack(given, turns=credit == "turn")
        plan = plan_step(batch, config, 10**6, torch.device("cpu"))
        set_targets(plan.tokens, config, lambda total: total)
        mask = plan.tokens.loss_mask
        ends.append(
            (plan.batch.rollout_ids.tolist(), plan.tokens.advantages[mask], zero_gradient_sequences(batch, config))
        )
    assert ends[0][0] == ends[1][0] and torch.equal(ends[0][1], ends[1][1])
    np.testing.assert_array_equal(ends[0][2], ends[1][2])


@pytest.mark.parametrize("advantage", ["raw", "loo", "group_norm"])
def test_only_sequences_without_an_advantage_in_any_turn_are_idle(advantage: str) -> None:
    """Equal scores are not enough, and zero scores neither."""
    given = [dataclasses.replace(sample, reward=0.0) for sample in with_turns()]
    for i in (0, 1, 2, 3):
        turns = tuple(dataclasses.replace(turn, reward=0.0) for turn in given[i].rollout.turns)
        given[i] = dataclasses.replace(given[i], rollout=dataclasses.replace(given[i].rollout, turns=turns))
    batch, config = pack(given, turns=True), AlgorithmConfig(advantage=advantage, credit="turn")
    idle = zero_gradient_sequences(batch, config)
    plan = plan_step(batch, config, 10**6, torch.device("cpu"))
    set_targets(plan.tokens, config, lambda total: total)
    moved = {
        rollout_id: bool(plan.tokens.advantages[plan.tokens.sequence_ids == index].any())
        for index, rollout_id in enumerate(plan.batch.rollout_ids.tolist())
    }
    assert idle[:4].all() and not idle[4:].all()
    assert not any(moved[int(rollout_id)] for rollout_id in batch.rollout_ids[idle])


# --- with a critic -------------------------------------------------------------------------------------------------


def values_of(exact: bool, gamma: float = 1.0) -> list[np.ndarray]:
    """Of the state before each token of each response; exact ones are those of the present policy. Others are random,
    and all depend on what lies before alone; those at observed tokens are NaN, which nothing may read."""
    known = state_values(gamma) if exact else {}
    draws, found = np.random.default_rng(8), []
    for episode in episodes():
        own = np.full(len(episode.ids), np.nan)
        for first, end in episode.spans:
            for place in range(first, end):
                state = episode.prefix(place)
                own[place] = known[state] if exact else known.setdefault(state, float(draws.normal()))
        found.append(own)
    return found


def state_values(gamma: float) -> dict[tuple[int, ...], float]:
    """V^pi of each state in which a token is chosen: the expected return from its turn on."""
    weight: dict[tuple[int, ...], float] = {}
    total: dict[tuple[int, ...], float] = {}
    for episode, chance in zip(episodes(), chances(0), strict=True):
        for (first, end), gain in zip(episode.spans, episode.returns(gamma), strict=True):
            for place in range(first, end):
                state = episode.prefix(place)
                weight[state] = weight.get(state, 0.0) + chance
                total[state] = total.get(state, 0.0) + chance * gain
    return {state: total[state] / weight[state] for state in total}


GAE = dataclasses.replace(PLAIN, advantage="gae")
VTRACE = dataclasses.replace(PLAIN, advantage="vtrace", rho_bar=1e6, c_bar=1e6)


def test_gae_over_turns_is_unbiased_for_any_critic() -> None:
    """With lambda 1, a baseline of the state before the turn changes nothing."""
    batch = enumerated(0, values=values_of(exact=False))
    assert_exact(found(dataclasses.replace(GAE, gamma=0.5), batch, critic_served=True), truth_by_turns(0.5))


@pytest.mark.parametrize("lag", [0, LAG])
def test_one_step_of_a_turn_suffices_with_the_right_critic(lag: int) -> None:
    batch = enumerated(lag, values=values_of(exact=True, gamma=0.5))
    algorithm = corrected(GAE, lag, gamma=0.5, lam=0.0)
    assert_exact(found(algorithm, batch, critic_served=True), truth_by_turns(0.5))


@pytest.mark.parametrize("lag", [0, LAG])
def test_vtrace_over_turns_weighs_a_turn_by_its_whole_ratio(lag: int) -> None:
    """Its states are the sampler's, its turns the policy's: -sum_k E_mu(s_k) E_pi[A_k grad log pi(turn k)]."""
    model, loss = copied(policies()[1]), torch.zeros((), dtype=torch.float64)
    values = state_values(0.5)
    with torch.no_grad():
        old = logprobs_of(copied(sampler(lag)))
    for episode, own, mu in zip(episodes(), logprobs_of(model), old, strict=True):
        cut = len(episode.turns[0])
        first, second = own[:cut].sum(), own[cut:].sum()
        whole = own.sum().exp().detach()  # of the first turn's advantage: all that follows is summed out
        starts = [values[episode.prefix(start)] for start, _ in episode.spans]
        loss = loss - whole * (episode.rewards[0] + 0.5 * starts[1] - starts[0]) * first
        reached = mu[:cut].sum().exp() * second.exp().detach()
        loss = loss - reached * (episode.rewards[1] - starts[1]) * second
    batch = enumerated(lag, values=values_of(exact=True, gamma=0.5))
    algorithm = dataclasses.replace(VTRACE, gamma=0.5)
    assert_exact(found(algorithm, batch, critic_served=True), gradient_of(model, loss))


@pytest.mark.parametrize("lag", [0, LAG])
@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
def test_targets_are_in_expectation_the_values_of_the_present_policy(advantage: str, lag: int) -> None:
    """At every token, also within a turn, from a critic that knows nothing."""
    algorithm = dataclasses.replace(VTRACE, gamma=0.5)
    if advantage == "gae":
        algorithm = dataclasses.replace(corrected(GAE, LAG, gamma=0.5), c_bar=1e6)
    trained = backend(algorithm, model=copied(policies()[1]), critic_served=True)
    plans: list[Any] = []
    trained.observe = plans.append
    trained.train_step(enumerated(lag, values=values_of(exact=False)))
    tokens, order = plans[0].tokens, plans[0].batch.rollout_ids.tolist()
    weight: dict[tuple[int, ...], float] = {}
    total: dict[tuple[int, ...], float] = {}
    for index, i in enumerate(order):
        episode = episodes()[i]
        places = [place for first, end in episode.spans for place in range(first, end)]
        for place, target in zip(places, tokens.returns[tokens.sequence_ids == index].tolist(), strict=True):
            state, chance = episode.prefix(place), chances(lag)[i]
            weight[state] = weight.get(state, 0.0) + chance
            total[state] = total.get(state, 0.0) + chance * target
    exact = state_values(0.5)
    assert len(exact) == 20 and exact.keys() == total.keys()
    for state, value in exact.items():
        assert_close(total[state] / weight[state], value, atol=1e-4)


def recursion(
    rewards: list[np.ndarray], values: list[np.ndarray], ratios: list[np.ndarray], last: float, kind: str, **how: float
) -> tuple[list[float], list[np.ndarray]]:
    """Turn by turn, from the back: (advantage of each turn, target of each token). Arrays are of one turn's tokens."""
    gamma, lam = how["gamma"], how["lam"]
    advantages, targets = [], []
    following, gap = last, 0.0  # V and v - V of the next turn's start
    for earned, value, ratio in zip(reversed(rewards), reversed(values), reversed(ratios), strict=True):
        own = np.empty(len(earned))
        for t in range(len(earned)):
            ahead = np.prod(ratio[t:])
            rho, trace = (1.0, lam) if kind == "plain" else (min(how["rho_bar"], ahead), lam * min(how["c_bar"], ahead))
            delta = earned[t:].sum() + gamma * following - value[t]
            own[t] = value[t] + rho * delta + gamma * trace * gap
            if t == 0:
                gained = rho * (delta + gamma * gap) if kind == "vtrace" else delta + gamma * lam * gap
        advantages.append(gained)
        targets.append(own)
        following, gap = value[0], own[0] - value[0]
    return advantages[::-1], targets[::-1]


@pytest.mark.parametrize("kind", ["plain", "gae", "vtrace"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_of_segments_are_the_recursion_written_out(kind: str, seed: int) -> None:
    draws, how = np.random.default_rng(seed), {"gamma": 0.9, "lam": 0.8, "rho_bar": 1.3, "c_bar": 0.9}
    sizes = [draws.integers(1, 4, int(draws.integers(1, 5))) for _ in range(6)]
    ids = np.repeat(np.arange(6), [size.sum() for size in sizes])
    numbers = np.concatenate([np.repeat(np.arange(len(size)), size) for size in sizes])
    rewards, values, logs = (draws.normal(size=len(ids)) for _ in range(3))
    mask, final = draws.random(len(ids)) < 0.8, draws.normal(size=6)
    given: dict[str, Any] = {"numbers": torch.from_numpy(numbers), "final_values": torch.from_numpy(final), **how}
    given |= {"loss_mask": torch.from_numpy(mask), "sequence_ids": torch.from_numpy(ids)}
    given["log_ratio"] = None if kind == "plain" else torch.from_numpy(np.where(mask, logs, np.nan))
    advantages, targets = segment_gae(
        torch.from_numpy(rewards), torch.from_numpy(values), rule=vtrace if kind == "vtrace" else gae, **given
    )
    for sequence in range(6):
        turns = [(ids == sequence) & (numbers == k) for k in range(len(sizes[sequence]))]
        parts = [[array[turn] for turn in turns] for array in (rewards, values, np.where(mask, np.exp(logs), 1.0))]
        gains, aims = recursion(*parts, last=final[sequence], kind=kind, **how)  # type: ignore[misc]
        for turn, gain, aim in zip(turns, gains, aims, strict=True):
            assert_close(advantages[turn], np.where(mask[turn], gain, 0.0), atol=1e-9)
            assert_close(targets[turn], np.where(mask[turn], aim, 0.0), atol=1e-9)


def test_a_cut_episodes_last_turn_is_worth_what_the_critic_says() -> None:
    """Under truncated=bootstrap the value after the cut replaces that turn's reward; those before it count."""
    given = with_turns()
    config = AlgorithmConfig(advantage="gae", credit="turn", truncated="bootstrap", correction="none", gamma=0.9)
    plan = plan_step(pack(given, turns=True), config, 10**6, torch.device("cpu"))
    tokens = plan.tokens
    tokens.values = torch.zeros(len(tokens.sequence_ids))
    tokens.final_values = torch.where(tokens.truncated, 7.0, 0.0)
    set_targets(tokens, config, lambda total: total)
    assert 0 < tokens.truncated.sum() < len(given)
    for index, rollout_id in enumerate(plan.batch.rollout_ids.tolist()):
        earned = rewards_of(given[rollout_id])
        if given[rollout_id].rollout.finish_reason == "length":
            earned[-1] = 0.9 * 7.0
        gain = sum(0.9**k * reward for k, reward in enumerate(earned))
        here = (tokens.sequence_ids == index).numpy()
        first = here & (tokens.turns == 0).numpy() & tokens.loss_mask.numpy()
        assert_close(tokens.advantages[first], np.full(first.sum(), gain), atol=1e-5)


# --- the way of the turns ------------------------------------------------------------------------------------------


def test_packed_turns_lie_on_their_tokens_and_go_with_their_sequence() -> None:
    given = with_turns()
    batch = pack(given, turns=True)
    assert batch.turns is not None and batch.turn_rewards is not None
    np.testing.assert_array_equal(batch.turns >= 0, batch.response_mask)
    for chosen in (batch, select(batch, range(len(given))[::-1]), share(batch, 1, 2)):
        for index, rollout_id in enumerate(chosen.rollout_ids.tolist()):
            sample = given[rollout_id]
            here = slice(chosen.cu_seqlens[index] + len(sample.rollout.prompt.token_ids), chosen.cu_seqlens[index + 1])
            numbers, rewards = chosen.turns[here], chosen.turn_rewards[here]  # type: ignore[index]
            for k, (turn, earned) in enumerate(zip(sample.rollout.turns, rewards_of(sample), strict=True)):
                assert numbers[turn.start : turn.end].tolist() == [k] * (turn.end - turn.start)
                assert rewards[turn.end - 1] == pytest.approx(earned, abs=FLOAT32 * 10)
            assert rewards.sum() == pytest.approx(sample.reward, abs=1e-5)
            ends = [turn.end - 1 for turn in sample.rollout.turns]
            assert not np.delete(rewards, ends).any()
    assert pack(given).turns is None and pack(given).turn_rewards is None
    empty = empty_batch(reference=False, values=False, turns=True)
    assert empty.turns is not None and len(empty.turns) == 0


@pytest.mark.parametrize("advantage", ["group_norm", "whiten", "gae", "vtrace", "raw"])
def test_microbatches_and_an_empty_share_change_nothing(advantage: str) -> None:
    algorithm = AlgorithmConfig(advantage=advantage, credit="turn", gamma=0.9)
    batch, ends = pack(with_turns(), turns=True), []
    for budget in (1, 10**6):
        trained = backend(algorithm)
        trained._token_budget = budget
        trained.train_step(batch)
        ends.append(gradients(trained))
    assert_close(ends[0], ends[1], rtol=0.0, atol=0.0, of_largest=1e-5)
    backend(algorithm).train_step(empty_batch(reference=False, values=False, turns=True))


EPISODES = ["episode.environment=tests.worlds:Sums", "reward.kind=environment", "algorithm.credit=turn"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm=vcpo"], "algorithm.advantage=opob has one advantage for a whole sequence"),
        (["algorithm=gmpo"], "algorithm.coef=geoclip has one advantage for a whole sequence"),
        (["algorithm=tba"], "algorithm.credit=turn has no place in algorithm.head=regress"),
        (["algorithm=online_dpo"], "algorithm.credit=turn has no place in algorithm.head=pair"),
        (["algorithm=dapo"], "buffer.filter_zero_spread=true compares whole episodes"),
        (["reward.normalize=batch"], "reward.normalize=batch rescales the reward of an episode"),
        (["episode.environment=", "reward.kind=task"], "without an environment, tools or agent there are none"),
        (["algorithm.credit=episode", "algorithm.gamma=0.9"], "credit=turn"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_config([*EPISODES, *words])
    assert "allowed: " in str(caught.value)


def test_a_discount_of_turns_fits_every_advantage_of_tokens() -> None:
    for name in ("grpo", "rloo", "reinforce", "reinforce_pp", "ppo", "vtrace", "gspo", "a3po"):
        assert load_config([*EPISODES, f"algorithm={name}", "algorithm.gamma=0.9"]).algorithm.gamma == 0.9
