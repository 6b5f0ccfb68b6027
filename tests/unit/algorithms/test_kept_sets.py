"""Log-probs, entropies and collisions on the kept sets of truncated sampling, and what their gradients expect."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncrlhf.algorithms.coefficients import cap
from asyncrlhf.algorithms.logprobs import KeptSets, collision_probability, kept_mass, token_logprobs
from asyncrlhf.algorithms.losses import policy_loss
from tests.truncated import renormalised

V = 11
SETS: list[set[int]] = [{0, 3, 7}, set(), {2}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {0, 10}, set(), {5, 6}]
# Of float64 sums over at most 11 terms of order 10.
EXACT = 1e-12


def kept_sets(sets: list[set[int]]) -> KeptSets:
    ids = torch.tensor([i for kept in sets for i in kept], dtype=torch.int32)
    return KeptSets.of_counts(ids, torch.tensor([len(kept) for kept in sets], dtype=torch.int32))


def world(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and targets [T] inside the sets."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(SETS), V, generator=generator, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), torch.tensor([max(kept or {4}) for kept in SETS])


@pytest.mark.parametrize("chunk", [0, 1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_on_the_sets(chunk: int, temperature: float) -> None:
    logits, targets = world()
    options = {"temperature": temperature, "chunk_tokens": chunk, "kept": kept_sets(SETS)}
    found, entropy = token_logprobs(logits, targets, **options)  # type: ignore[arg-type]
    expected = renormalised(logits, SETS, temperature)
    own = expected.gather(1, targets[:, None])[:, 0]
    parts = [row[row > -torch.inf] for row in expected]
    own_entropy = torch.stack([-(part.exp() * part).sum() for part in parts])
    torch.testing.assert_close(found, own, rtol=0, atol=EXACT)
    torch.testing.assert_close(entropy, own_entropy, rtol=0, atol=EXACT)
    collision = collision_probability(logits.detach(), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(collision, expected.detach().exp().square().sum(-1), rtol=0, atol=EXACT)
    a, b = torch.randn(2, len(SETS), dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    for weights in ((a, 0 * b), (0 * a, 7 * b), (a, b)):
        ours = torch.autograd.grad(found @ weights[0] + entropy @ weights[1], logits, retain_graph=True)[0]
        theirs = torch.autograd.grad(own @ weights[0] + own_entropy @ weights[1], logits, retain_graph=True)[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * EXACT)
        outside = kept_sets(SETS).outside(V)
        assert outside.any() and (ours[outside] == 0).all()


def test_the_gradient_is_that_of_finite_differences() -> None:
    logits, targets = world()
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, targets, temperature=0.8, chunk_tokens=2, kept=kept_sets(SETS)), (logits,)
    )


def test_empty_sets_change_nothing() -> None:
    """To the bit, so that a batch in which one engine truncated and another did not trains both rightly."""
    logits, targets = world(torch.float32)
    none = kept_sets([set() for _ in SETS])
    plain, given = token_logprobs(logits, targets), token_logprobs(logits, targets, kept=none)
    for ours, theirs in zip(given, plain, strict=True):
        assert torch.equal(ours, theirs)
        mine, yours = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs))
        assert torch.equal(mine, yours)
    assert (kept_mass(logits.detach(), none) == 1).all()


def test_a_large_weight_on_the_entropy_leaves_no_nan() -> None:
    logits, targets = world(torch.float32)
    entropy = token_logprobs(logits, targets, kept=kept_sets(SETS))[1]
    assert torch.isfinite(torch.autograd.grad(1e6 * entropy.sum(), logits)[0]).all()


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_mass_of_a_set(chunk: int) -> None:
    logits, _ = world()
    found = kept_mass(logits.detach(), kept_sets(SETS), temperature=0.7, chunk_tokens=chunk)
    pi = (logits.detach() / 0.7).softmax(-1)
    expected = torch.stack([pi[row, sorted(kept or set(range(V)))].sum() for row, kept in enumerate(SETS)])
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


def test_rows_and_positions_of_sets() -> None:
    def listed(kept: KeptSets) -> list[set[int]]:
        assert len(kept.ids) == int(kept.starts[-1])
        return [set(part.tolist()) for part in kept.ids.split(kept.starts.diff().tolist())]

    kept = kept_sets(SETS)
    assert listed(kept) == SETS
    assert listed(kept.rows(2, 5)) == SETS[2:5] and listed(kept.rows(3, 3)) == []
    assert listed(kept.at(torch.tensor([6, 1, 0, 0]))) == [SETS[6], SETS[1], SETS[0], SETS[0]]
    assert listed(kept.at(torch.zeros(0, dtype=torch.int64))) == []


# Two tokens from an alphabet of W, sampled with top-k 3: every sequence that the sampler can make, once.

W, K = 5, 3


class Table:
    """Logits [W + W * W] of a policy over two tokens, a leaf."""

    def __init__(self, seed: int) -> None:
        self.logits = torch.randn(W + W * W, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.logits.requires_grad_()

    def after(self, first: int) -> Tensor:
        return self.logits[W:].view(W, W)[first]


PI, MU = Table(4), Table(6)


class World:
    """What truncated sampling from ``sampler`` can make; the sets stay, whatever the policy becomes."""

    def __init__(self, sampler: Table) -> None:
        first = sampler.logits[:W].topk(K).indices.tolist()
        second = {a: sampler.after(a).topk(K).indices.tolist() for a in first}
        self.sequences = [(a, b) for a in first for b in second[a]]
        self.sets = [set(part) for a, _ in self.sequences for part in (first, second[a])]
        self.targets = torch.tensor([token for sequence in self.sequences for token in sequence])
        self.rewards = torch.randn(K * K, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.sampled = self.probs(sampler).detach()

    def rows(self, policy: Table) -> Tensor:
        """Logits [2 K K, W] of the sequences' tokens."""
        return torch.stack([row for a, _ in self.sequences for row in (policy.logits[:W], policy.after(a))])

    def plainly(self, policy: Table) -> Tensor:
        """Log-probs [2 K K] renormalised on the sets, by the reference."""
        return renormalised(self.rows(policy), self.sets, 1.0).gather(1, self.targets[:, None])[:, 0]

    def probs(self, policy: Table) -> Tensor:
        """Of the sequences [K K] under the policy renormalised on the sets, summing to 1."""
        return self.plainly(policy).view(-1, 2).sum(1).exp()

    def on_sets(self, policy: Table) -> Tensor:
        return token_logprobs(self.rows(policy), self.targets, kept=kept_sets(self.sets))[0]

    def whole(self, policy: Table) -> Tensor:
        return token_logprobs(self.rows(policy), self.targets)[0]

    def mass(self, policy: Table) -> Tensor:
        return kept_mass(self.rows(policy).detach(), kept_sets(self.sets))

    def gradient(self, theta: Tensor, mu: Tensor, baseline: float = 0.0) -> Tensor:
        """E over the sampler's sequences of the kernel's gradient, under the sequence's uncut ratio to ``mu``."""
        ids = torch.arange(K * K).repeat_interleave(2)
        loss = policy_loss(
            theta, mu.detach(), (self.rewards - baseline)[ids], torch.ones(2 * K * K).bool(), ids,
            coefficient=cap(0.0, math.inf), level="prod", aggregate="seq_sum", normaliser=1.0,
            sample_weights=self.sampled,
        ).loss  # fmt: skip
        return torch.autograd.grad(loss, PI.logits)[0]

    def truth(self) -> Tensor:
        """Of -E[R] over pi renormalised on the sets, these held fixed, by autograd of the exact sum."""
        return torch.autograd.grad(-(self.probs(PI) * self.rewards).sum(), PI.logits)[0]

    def error(self, found: Tensor) -> float:
        return float((found - self.truth()).norm() / self.truth().norm())


@pytest.mark.parametrize("sampler", [PI, MU], ids=["on-policy", "off-policy"])
def test_on_the_sets_the_gradient_is_exact_and_a_baseline_is_free(sampler: Table) -> None:
    world = World(sampler)
    assert float(world.sampled.sum()) == pytest.approx(1.0, abs=1e-14)
    for baseline in (0.0, 0.7):
        found = world.gradient(world.on_sets(PI), world.plainly(sampler), baseline)
        assert world.error(found) < EXACT


@pytest.mark.parametrize("sampler", [PI, MU], ids=["on-policy", "off-policy"])
def test_neither_the_whole_distribution_nor_its_kept_mass_will_do(sampler: Table) -> None:
    """The kept mass added to mu makes the ratio 1 at equal weights, and is biased all the same: E_S[grad log pi] is not
    0, so that a baseline changes the gradient as well."""
    world = World(sampler)
    mu = world.plainly(sampler)
    assert world.error(world.gradient(world.whole(PI), mu)) > 0.05
    with_mass = mu + world.mass(sampler).log()
    torch.testing.assert_close(world.whole(sampler), with_mass, rtol=0, atol=EXACT)
    plain, lowered = (world.gradient(world.whole(PI), with_mass, baseline) for baseline in (0.0, 0.7))
    assert world.error(plain) > 0.05 and world.error(lowered) > 0.05
    assert float((plain - lowered).norm() / world.truth().norm()) > 0.05
