"""The torch training backend: one learner rank, alone or under DistributedDataParallel."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrlhf.algorithms.step_size import sqrt_ess_factor
from asyncrlhf.errors import AsyncRLHFError, CheckpointError, ConfigError
from asyncrlhf.learner import checkpoint, lookahead
from asyncrlhf.learner.algorithm import AlgorithmConfig
from asyncrlhf.learner.base import StepResult
from asyncrlhf.learner.config import LearnerConfig
from asyncrlhf.learner.critic import ValueModel
from asyncrlhf.learner.distributed import all_gather, all_sum, barrier, data_parallel, reducing
from asyncrlhf.learner.ema import EmaPolicy
from asyncrlhf.learner.forward import PackedInputs, PackedPolicy, TokenFacts
from asyncrlhf.learner.loss import MicrobatchLosses, critic_loss
from asyncrlhf.learner.metrics import export, merge, step_metrics
from asyncrlhf.learner.optim import Updater, schedule_factor, set_learning_rate
from asyncrlhf.learner.plan import Microbatch, StepPlan, normaliser_counts, plan_step
from asyncrlhf.learner.record import StepRecord
from asyncrlhf.learner.targets import Passes, Targets, build_targets
from asyncrlhf.learner.user_loss import UserLoss
from asyncrlhf.types import FloatArray, TrainBatch

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackend:
    """Trains ``model`` in place: float32 master weights, packed forward passes, exact gradients.

    The gradient of an optimizer update does not depend on how its sequences are spread over microbatches and ranks:
    every normaliser is counted over all of them first, and what an algorithm must know of the whole update is
    collected first (``lookahead``). Sequences that have no gradient for certain (groups without reward spread, losers
    that make no pair) take part in the normaliser and the metrics, and are spared the backward pass.

    Args:
        model: a loaded causal language model; it becomes float32 and moves to ``device``.
        reference: the frozen policy of the KL or of a head; needed exactly when ``algorithm.needs_reference``.
        steps: learner steps of the whole run, for the learning-rate schedule.
        temperature: the generator's sampling temperature; policy log-probs are taken at the same one, so that policy
            and behavior log-probs speak of one distribution (top-k and top-p apart). 0, greedy, counts as 1.
        max_completion_length: the constant of ``algorithm.aggregate=const``.
        rank, ranks: with ``ranks > 1`` torch.distributed must have been initialised, see ``init_process_group``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        steps: int,
        reference: PreTrainedModel | None = None,
        temperature: float = 1.0,
        max_completion_length: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        device: str | torch.device = "cpu",
    ) -> None:
        if algorithm.needs_reference and reference is None:
            what = f"anchor={algorithm.anchor}" if algorithm.kl == "none" else f"kl={algorithm.kl}"
            raise ConfigError(f"algorithm.{what} needs a reference model, and the learner was given none.")
        self.config, self.algorithm, self.steps = config, algorithm, steps
        self.rank, self.ranks, self.device = rank, ranks, torch.device(device)
        self.temperature = temperature or 1.0
        self.constant_length = float(max_completion_length) if max_completion_length else None
        self._losses = MicrobatchLosses(algorithm, UserLoss(algorithm.loss.target) if algorithm.loss.target else None)
        self.model = model.float().train()
        nn.Module.to(self.model, self.device)
        self.policy = PackedPolicy(self.model, compile=config.compile, collision=algorithm.advantage == "opob")
        self.critic = ValueModel(self.model) if algorithm.needs_critic else None
        self.ema = EmaPolicy(self.model, algorithm.ema_decay) if algorithm.anchor == "ema" else None
        self.reference = _frozen(reference, self.device) if algorithm.needs_reference and reference else None
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.updater = Updater(config, self.policy, self.critic, self.device, ranks)
        self._policy_ddp = data_parallel(self.policy, ranks)
        self._critic_ddp = None if self.critic is None else data_parallel(self.critic, ranks)
        self._dummy = PackedInputs.dummy(self.device)
        self._version = 0
        self._skipped_in_a_row = 0

    @property
    def policy_version(self) -> int:
        return self._version

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def before_update(self, callback: Callable[[], object]) -> None:
        self.updater.before_update(callback)

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One learner step on this rank's whole groups (``data.packing.shard``); an empty share is fine.

        Raises AsyncRLHFError after ``learner.max_skipped_steps`` steps in a row without a finite gradient.
        """
        started = time.perf_counter()
        plan = plan_step(batch, self.algorithm, self.config.token_budget, self.device, self._version)
        record = StepRecord.empty(len(plan.tokens.loss_mask), self.device)
        targets = self._targets(plan, record)
        normalisers = self._normalisers(plan)
        losses: list[torch.Tensor] = []
        norms: list[float] = []
        rates: dict[str, float] = {}
        for iteration in range(self.algorithm.num_iterations):
            for index, minibatch in enumerate(plan.minibatches):
                unmoved = not norms
                fresh = unmoved and targets.proximal is not None
                losses.append(self._accumulate(plan, minibatch, targets, record, normalisers[:, index], fresh))
                if unmoved:
                    rates = self._set_rate(plan, record.policy if targets.proximal is None else targets.proximal)
                norms.append(self.updater.apply())
            if iteration == 0 and targets.proximal is None:
                targets.proximal = record.proximal = record.policy.clone()
        if self.ema is not None:
            self.ema.update()
        self._version += 1
        skipped = sum(not math.isfinite(norm) for norm in norms)
        metrics = self._metrics(plan, targets, record, losses) | rates
        metrics |= {"grad_norm": norms[-1], "skipped_updates": float(skipped)}
        self._guard(skipped == len(norms))
        return StepResult(metrics, skipped=skipped == len(norms), seconds=time.perf_counter() - started)

    def score(self, token_ids: Sequence[np.ndarray]) -> list[FloatArray]:
        """Log-probs of each token given those before it, at temperature 1 whatever the learner's; [len-1] a text."""
        scores: list[FloatArray] = []
        for text in token_ids:
            tokens = np.asarray(text, dtype=np.int64)
            if len(tokens) < 2:
                scores.append(np.zeros(0, dtype=np.float32))
                continue
            predicted = np.arange(len(tokens)) > 0
            inputs = PackedInputs.build(tokens, np.array([0, len(tokens)]), predicted, self.device)
            with torch.no_grad(), self._autocast():
                facts = self.policy(inputs, 1.0)
            scores.append(facts.logprobs.float().cpu().numpy())
        return scores

    def save(self, folder: Path) -> None:
        """``model/`` in ``from_pretrained`` format and ``trainer.pt`` from rank 0, ``rank-R.pt`` from each rank."""
        state = self.updater.state_dict() | {
            "version": self._version,
            "skipped_in_a_row": self._skipped_in_a_row,
            "critic": None if self.critic is None else self.critic.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }
        checkpoint.save(folder, self.model, state, self.rank)
        barrier(self.ranks)

    def load(self, folder: Path) -> None:
        """Go on from :meth:`save`, bit for bit; raises CheckpointError when a file is missing or does not fit."""
        state = checkpoint.load(folder, self.model, self.rank)
        parts = {"critic": ("advantage", self.critic), "ema": ("anchor", self.ema)}
        for name, (setting, part) in parts.items():
            saved = state.get(name)
            if (saved is None) != (part is None):
                raise CheckpointError(
                    f"{folder}: the checkpoint and algorithm.{setting} disagree on whether there is a {name} model."
                )
            if part is not None and saved is not None:
                part.load_state_dict(saved)
        self._version, self._skipped_in_a_row = state["version"], state["skipped_in_a_row"]
        self.updater.load_state_dict(state)
        barrier(self.ranks)

    def _autocast(self) -> AbstractContextManager:
        dtype = AUTOCAST.get(self.config.mixed_precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _facts(self, module: nn.Module, microbatch: Microbatch) -> TokenFacts:
        with self._autocast():
            facts: TokenFacts = module(microbatch.inputs, self.temperature)
        return facts

    @torch.no_grad()
    def _look(self, microbatches: Sequence[Microbatch], record: StepRecord) -> None:
        """Put what the present policy says of the microbatches on record."""
        for microbatch in microbatches:
            record.keep(microbatch.span, self._facts(self.policy, microbatch))

    @torch.no_grad()
    def _targets(self, plan: StepPlan, record: StepRecord) -> Targets:
        """Everything that must be known before the first update."""
        algorithm = self.algorithm
        proximal = None
        if algorithm.minibatches > 1 or (algorithm.advantage == "vtrace" and self.ema is None):
            self._look(plan.microbatches, record)
            proximal = record.proximal = record.policy.clone()
        passes = Passes(
            ref=None if self.reference is None else self._logprobs(plan, self.reference),
            ema=None if self.ema is None else self._logprobs(plan, self.ema.policy),
            proximal=proximal,
            values=None if self.critic is None else self._values(plan, self.critic),
        )
        targets = build_targets(plan.tokens, algorithm, passes, lambda total: all_sum(total, self.ranks))
        lookahead.new_targets(algorithm, targets)
        return targets

    def _logprobs(self, plan: StepPlan, policy: nn.Module) -> torch.Tensor:
        result = torch.zeros(len(plan.tokens.loss_mask), device=self.device)
        for microbatch in plan.microbatches:
            result[microbatch.span] = self._facts(policy, microbatch).logprobs.float()
        return result

    def _values(self, plan: StepPlan, critic: nn.Module) -> torch.Tensor:
        result = torch.zeros(len(plan.tokens.loss_mask), device=self.device)
        for microbatch in plan.microbatches:
            with self._autocast():
                result[microbatch.span] = critic(microbatch.inputs)
        return result

    def _normalisers(self, plan: StepPlan) -> torch.Tensor:
        """Of each update's policy loss and value loss, over all ranks: [2, minibatches]."""
        counts = normaliser_counts(plan, self.algorithm.aggregate, self.constant_length)
        return all_sum(torch.stack((counts, normaliser_counts(plan, "token", None))), self.ranks)

    def _set_rate(self, plan: StepPlan, proximal: torch.Tensor) -> dict[str, float]:
        """The schedule's rate, and what is used of it: less when few sequences carry the step (lr=sqrt_ess)."""
        factor = schedule_factor(self.config, self._version, self.steps)
        scheduled = set_learning_rate(self.updater.optimizer, factor)
        if self.algorithm.lr == "none":
            return {"learning_rate": scheduled, "effective_learning_rate": scheduled}
        fraction = lookahead.sequence_ess_fraction(plan, proximal, self.ranks)
        used = factor * sqrt_ess_factor(fraction, self.algorithm.lr_ess_base)
        effective = set_learning_rate(self.updater.optimizer, used)
        return {"learning_rate": scheduled, "effective_learning_rate": effective}

    def _accumulate(
        self,
        plan: StepPlan,
        minibatch: Sequence[Microbatch],
        targets: Targets,
        record: StepRecord,
        normalisers: torch.Tensor,
        fresh: bool,
    ) -> torch.Tensor:
        """The gradient of one optimizer update; returns policy and value loss [2] of this rank.

        ``fresh``: the record holds what the present policy says of the minibatch. Policy and critic go one after the
        other, so that the collectives of the two come in one order on all ranks.
        """
        self.updater.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(2, device=self.device)
        training = [microbatch for microbatch in minibatch if microbatch.trains]
        idle = [microbatch for microbatch in minibatch if not microbatch.trains]
        if not fresh:
            self._look(idle, record)
        filled = not lookahead.fills(self.algorithm)
        # With one training pass in all, that pass is the last thing to be known of the update, and no other is needed.
        if not filled and (fresh or self.ranks > 1 or len(training) != 1):
            if lookahead.needs_policy(self.algorithm) and not fresh:
                self._look(training, record)
            self._fill(plan, minibatch, targets, record)
            filled = True
        for microbatch in reducing(self._policy_ddp, training):
            facts = self._facts(self._policy_ddp, microbatch)
            record.keep(microbatch.span, facts)
            if not filled:
                self._fill(plan, minibatch, targets, record)
            loss = self._policy_loss(plan, microbatch, targets, record, facts, normalisers[0])
            self.updater.backward(loss)
            total[0] += loss.detach()
        if not training:
            dummy = self._policy_ddp(self._dummy, 1.0)
            ((dummy.logprobs.sum() + dummy.entropies.sum()) * 0.0).backward()
        with torch.no_grad():
            for microbatch in idle:
                self._policy_loss(plan, microbatch, targets, record, record.facts(microbatch.span), normalisers[0])
        if self._critic_ddp is not None:
            total[1] = self._accumulate_critic(self._critic_ddp, plan, training, targets, normalisers[1])
        return total

    def _policy_loss(
        self,
        plan: StepPlan,
        microbatch: Microbatch,
        targets: Targets,
        record: StepRecord,
        facts: TokenFacts,
        normaliser: torch.Tensor,
    ) -> torch.Tensor:
        result = self._losses(plan, microbatch, targets, facts.logprobs, facts.entropies, normaliser)
        record.clipped[microbatch.span] += result.clipped / self.algorithm.num_iterations
        return result.loss

    def _accumulate_critic(
        self,
        critic: nn.Module,
        plan: StepPlan,
        training: Sequence[Microbatch],
        targets: Targets,
        normaliser: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for microbatch in reducing(critic, training):
            with self._autocast():
                values = critic(microbatch.inputs)
            loss = critic_loss(self.algorithm, plan, microbatch, targets, values, normaliser)
            self.updater.backward(loss * self.algorithm.value_coef)
            total += loss.detach()
        if not training:
            (critic(self._dummy).sum() * 0.0).backward()
        return total

    @torch.no_grad()
    def _fill(self, plan: StepPlan, minibatch: Sequence[Microbatch], targets: Targets, record: StepRecord) -> None:
        lookahead.fill(self.algorithm, plan, minibatch, targets, record.policy, record.collision, self.ranks)

    def _metrics(
        self, plan: StepPlan, targets: Targets, record: StepRecord, losses: list[torch.Tensor]
    ) -> dict[str, float]:
        arrays = merge(all_gather(export(plan, targets, record), self.ranks))
        policy, value = all_sum(torch.stack(losses), self.ranks).mean(dim=0).tolist()
        metrics = step_metrics(arrays, self.algorithm) | {"loss": policy}
        return metrics if self.critic is None else metrics | {"value_loss": value}

    def _guard(self, skipped: bool) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= self.config.max_skipped_steps:
            raise AsyncRLHFError(
                f"The gradient was not finite in {self._skipped_in_a_row} learner steps in a row "
                "(learner.max_skipped_steps); lower learner.learning_rate or look at the rewards."
            )


def _frozen(reference: PreTrainedModel, device: torch.device) -> PackedPolicy:
    return PackedPolicy(nn.Module.to(reference, device).eval().requires_grad_(False))
