"""One learner rank: the train step, independent of the weights' layout over the ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from asyncrlhf.algorithms.aggregate import normaliser_count
from asyncrlhf.errors import AsyncRLHFError, CheckpointError
from asyncrlhf.learner.rank_models import RankModels
from asyncrlhf.learner.ranks import all_gather, all_sum, barrier, gathered
from asyncrlhf.learner.settings.learner_config import MOST_SKIPPED, VALUE_COEF, BackendSpec, StepResult
from asyncrlhf.learner.state import checkpoint
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.learner.step.companions import follow
from asyncrlhf.learner.step.loss import MicrobatchLosses, critic_loss
from asyncrlhf.learner.step.metrics import figures, step_statistics
from asyncrlhf.learner.step.plan import Microbatch, ResponseTokens, StepPlan, plan_step
from asyncrlhf.learner.step.targets import fill, fills, needs_policy, sequence_ess_fraction, set_targets
from asyncrlhf.learner.step.wall import check_branches
from asyncrlhf.learner.updates.updaters import schedule_factor
from asyncrlhf.models.copies import to_device
from asyncrlhf.types import TrainBatch


class TorchBackend(RankModels):
    """One rank of the learner group. Every method is called on all ranks together, ``score`` only with ``shards``.

    Trains ``model`` in place: float32 master weights, packed forward passes, exact gradients.

    The gradient of an optimizer update does not depend on how its sequences are spread over microbatches and ranks:
    every normaliser is counted over all of them first, and what an algorithm must know of the whole update is collected
    first (``targets.fill``). Sequences that cannot have a gradient (groups without reward spread, losers without a
    pair) count in the normaliser and the metrics, but have no backward pass.
    """

    def __init__(self, model: transformers.PreTrainedModel, spec: BackendSpec, **options: Any) -> None:
        """As of :class:`RankModels`."""
        super().__init__(model, spec, **options)
        self.steps = spec.steps
        self.constant_length = float(spec.max_completion_length) if spec.max_completion_length else None
        self._losses = MicrobatchLosses(spec.algorithm)
        self.writer = StateWriter(self.device)  # of checkpoints
        self.policy_version = 0  # completed learner steps
        self._skipped_in_a_row = 0
        self._critic_served = spec.critic_served
        self.observe: Callable[[StepPlan], None] = lambda plan: None  # what the step knew, once its updates are made

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One learner step on this rank's whole groups (``data.packing.share_out``); an empty share is allowed. Ranks
        with the same share (``LearnerConfig.shares``) get the same groups. ``policy_version`` increases by one, also
        when the update is skipped.

        Raises AsyncRLHFError after ``MOST_SKIPPED`` steps in a row without a finite gradient.
        """
        started = time.perf_counter()
        if self.replay is not None:
            self.replay.check(batch)
        check_branches(batch, self.config, self.policy)
        plan = plan_step(batch, self.algorithm, self._token_budget, self.device, self.policy_version)
        tokens = plan.tokens
        self._look_first(plan)
        normalisers = self._normalisers(plan)
        losses: list[torch.Tensor] = []
        found: list[torch.Tensor] = []  # the gradients' norms
        rates: dict[str, float] = {}
        for iteration in range(self.algorithm.num_iterations):
            for index, minibatch in enumerate(plan.minibatches):
                unmoved = not found
                fresh = unmoved and tokens.proximal_logprobs is not None
                losses.append(self._accumulate(plan, minibatch, normalisers[:, index], fresh))
                if unmoved:
                    rates = self._set_rate(plan)
                found.append(self.updater.apply())
                for halves in self.halves:
                    halves.drop()
            if iteration == 0 and tokens.proximal_logprobs is None:
                tokens.proximal_logprobs = tokens.policy_logprobs.clone()
        if self.ema is not None:
            now = gathered(self.shards) if self.shards else self.parameters().items()
            follow(self.ema, now, self.algorithm.ema_decay)
        self.policy_version += 1
        total, measured = plan.fetch(torch.stack(losses), torch.stack(found))
        norms: list[float] = measured.tolist()
        skipped = sum(not math.isfinite(norm) for norm in norms)
        metrics = self._metrics(plan, total) | rates
        metrics |= {"grad_norm": norms[-1], "skipped_updates": float(skipped)}
        self.observe(plan)
        self._guard(skipped == len(norms))
        return StepResult(metrics, skipped=skipped == len(norms), seconds=time.perf_counter() - started)

    def save(self, folder: Path) -> None:
        """:meth:`begin_save`, and wait until all ranks have written."""
        self.begin_save(folder)
        self.writer.end()
        barrier(self.ranks)

    def make_room(self) -> None:
        """Allocate the memory of a checkpoint's copy during further steps, once the optimizer has its states after the
        first. Otherwise the first checkpoint allocates it."""
        if self.config.backend == "torch":
            self.writer.rehearse(self.begin_save)

    def begin_save(self, folder: Path) -> None:
        """``model/`` in ``from_pretrained`` format and ``trainer.safetensors`` from rank 0, ``rank-R.safetensors`` from
        each rank. All is copied when this returns, and on disk when ``writer.end`` has returned."""
        self.writer.begin(folder)
        state = {
            "layout": self.config.layout,
            "version": self.policy_version,
            "skipped_in_a_row": self._skipped_in_a_row,
            "ema": None if self.ema is None else self.ema.model.state_dict(),
        }
        self.updater.save(folder, state, self.rank, self.writer)

    def load(self, folder: Path) -> None:
        """Continue from :meth:`save`, bit for bit, with this run's learning rates; raises CheckpointError if a file is
        missing or does not fit."""
        state = checkpoint.read(folder, self.config.layout, self.algorithm.saved_parts)
        own = self.updater.settings()
        try:
            self.updater.load(folder, state)
            self.updater.set_settings(own)
            if self.ema is not None:
                self.ema.model.load_state_dict(state["ema"])
            self.policy_version, self._skipped_in_a_row = state["version"], state["skipped_in_a_row"]
            checkpoint.restore_random_state(folder, self.rank)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{folder} does not hold this learner's state: {error!r:.300}.") from error
        barrier(self.ranks)

    @torch.no_grad()
    def _look_first(self, plan: StepPlan) -> None:
        """Compute the facts that are needed before the first update."""
        tokens = plan.tokens
        if self.algorithm.looks_first:
            self._passes.look(plan.microbatches, tokens)
            tokens.proximal_logprobs = tokens.policy_logprobs.clone()
        tokens.ref_logprobs = self._reference_logprobs(plan)
        tokens.ema_logprobs = None if self.ema is None else self._passes.all_logprobs(plan, self.ema)
        tokens.values = self._old_values(plan)
        if self.algorithm.truncated == "bootstrap":  # the critic's value replaces the rest of truncated answers
            tokens.final_values = self._passes.final_values(plan, self._token_budget)
        if tokens.values is not None or self.algorithm.kl == "reward":
            plan.fetch()
        set_targets(plan.host, self.algorithm, lambda total: all_sum(total, self._peers))
        plan.send()

    def _reference_logprobs(self, plan: StepPlan) -> torch.Tensor | None:
        """[M], by this rank's frozen model or from the batch."""
        if self.reference is not None:
            return self._passes.all_logprobs(plan, self.reference)
        if self.algorithm.needs_reference and plan.tokens.ref_logprobs is None:
            raise AsyncRLHFError("A batch came without the reference's log-probs, and the learner holds no reference.")
        return plan.tokens.ref_logprobs

    def _old_values(self, plan: StepPlan) -> torch.Tensor | None:
        """[M], by the present critic or from the batch."""
        if self.critic is None or not self._critic_served:
            return None if self.critic is None else self._passes.all_values(plan)
        if plan.tokens.values is None:
            raise AsyncRLHFError("A batch came without the critic's values, which critic.workers leaves to it.")
        return plan.tokens.values

    def _normalisers(self, plan: StepPlan) -> torch.Tensor:
        """Of each update's policy loss and value loss, over all ranks: [2, minibatches]."""
        updates = [plan.host.part(minibatch) for minibatch in plan.minibatches]
        counts = [
            normaliser_count(how, update.loss_mask, update.sequence_ids, constant_length=self.constant_length)
            for how in (self.algorithm.aggregate, "token")
            for update in updates
        ]
        return to_device(all_sum(torch.stack(counts).view(2, -1), self._peers), self.device)

    def _set_rate(self, plan: StepPlan) -> dict[str, float]:
        """The schedule's learning rate, and the rate used: lower if few sequences carry the step (lr=sqrt_ess)."""
        factor = schedule_factor(self.config, self.policy_version, self.steps)
        scheduled = self.updater.set_rate(factor)
        if self.algorithm.lr == "none":
            return {"learning_rate": scheduled, "effective_learning_rate": scheduled}
        plan.fetch()
        tokens = plan.host
        proximal = tokens.policy_logprobs if tokens.proximal_logprobs is None else tokens.proximal_logprobs
        fraction = sequence_ess_fraction(tokens, proximal, self._peers)
        used = factor * math.sqrt(min(1.0, fraction))  # VCPO, 2602.17616
        effective = self.updater.set_rate(used)
        return {"learning_rate": scheduled, "effective_learning_rate": effective}

    def _accumulate(
        self, plan: StepPlan, minibatch: Sequence[Microbatch], normalisers: torch.Tensor, fresh: bool
    ) -> torch.Tensor:
        """The gradient of one optimizer update; returns policy and value loss [2] of this rank.

        ``fresh``: the present policy's pass over the minibatch is already recorded. Policy and critic run one after the
            other, so that their collectives have the same order on all ranks.
        """
        algorithm, tokens = self.algorithm, plan.tokens
        self.updater.begin()
        total = torch.zeros(2, device=self.device)
        training = [microbatch for microbatch in minibatch if microbatch.trains]
        idle = [microbatch for microbatch in minibatch if not microbatch.trains]
        if not fresh:
            self._passes.look(idle, tokens)
        filled = not fills(algorithm)
        # If there is only one training pass, it completes the facts of the update, and no other is needed.
        if not filled and (fresh or self.ranks > 1 or len(training) != 1):
            if needs_policy(algorithm) and not fresh:
                self._passes.look(training, tokens)
            self._fill(plan, minibatch)
            filled = True
        policy = self.updater.policy
        for microbatch in self.updater.trains(policy, training):
            facts = self._passes.facts(policy, microbatch)
            if microbatch is None:
                self.updater.backward(policy, (facts.logprobs.sum() + facts.entropies.sum()) * 0.0)
                continue
            tokens.part([microbatch]).keep(facts)
            if not filled:
                self._fill(plan, minibatch)
            part = tokens.part([microbatch])
            part.policy_logprobs, part.entropy = facts.logprobs, facts.entropies
            loss = self._policy_loss(part, normalisers[0])
            self.updater.backward(policy, loss)
            total[0] += loss.detach()
        with torch.no_grad():
            for microbatch in idle:
                self._policy_loss(tokens.part([microbatch]), normalisers[0])
        if self.updater.critic is not None:
            total[1] = self._accumulate_critic(self.updater.critic, tokens, training, normalisers[1])
        return total

    def _fill(self, plan: StepPlan, minibatch: Sequence[Microbatch]) -> None:
        """Write the targets of one update, from what the passes found."""
        plan.fetch()
        fill(self.algorithm, plan.host, minibatch, self._peers)
        plan.send()

    def _policy_loss(self, part: ResponseTokens, normaliser: torch.Tensor) -> torch.Tensor:
        loss, clipped = self._losses(part, normaliser)
        part.clipped += clipped / self.algorithm.num_iterations
        return loss

    def _accumulate_critic(
        self, critic: nn.Module, tokens: ResponseTokens, training: Sequence[Microbatch], normaliser: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for microbatch in self.updater.trains(critic, training):
            values = self._passes.values(critic, microbatch)
            if microbatch is None:
                self.updater.backward(critic, values.sum() * 0.0)
                continue
            loss = critic_loss(self.algorithm, tokens.part([microbatch]), values, normaliser)
            self.updater.backward(critic, loss * VALUE_COEF)
            total += loss.detach()
        return total

    def _metrics(self, plan: StepPlan, losses: torch.Tensor) -> dict[str, float]:
        """``losses`` [updates, 2], of the policy and of the critic."""
        found = step_statistics(plan, self.algorithm)
        policy, value = all_sum(losses, self._peers).mean(dim=0).tolist()
        metrics = figures(all_gather(found, self._peers)) | {"loss": policy}
        if self.replay is not None:
            metrics["routes_changed"] = self.replay.differing(self.ranks, self.device)
        return metrics if self.critic is None else metrics | {"value_loss": value}

    def _guard(self, skipped: bool) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= MOST_SKIPPED:
            raise AsyncRLHFError(
                f"The gradient was not finite in {self._skipped_in_a_row} learner steps in a row; "
                "lower learner.learning_rate or look at the rewards."
            )
