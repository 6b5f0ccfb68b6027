"""The torch training backend: one learner rank, alone or under DistributedDataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from asyncrlhf.algorithms.losses import value_loss
from asyncrlhf.errors import AsyncRLHFError, CheckpointError, ConfigError
from asyncrlhf.learner import checkpoint
from asyncrlhf.learner.base import StepResult
from asyncrlhf.learner.config import AlgorithmConfig, LearnerConfig
from asyncrlhf.learner.critic import ValueModel
from asyncrlhf.learner.distributed import all_gather, all_sum, barrier
from asyncrlhf.learner.forward import PackedInputs, PackedPolicy
from asyncrlhf.learner.metrics import StepRecord, export, merge, step_metrics
from asyncrlhf.learner.optim import build_optimizer, clip_gradient, schedule_factor, set_learning_rate
from asyncrlhf.learner.step import (
    Microbatch,
    StepPlan,
    Targets,
    coefficient_rule,
    compute_advantages,
    microbatch_loss,
    normaliser_counts,
    plan_step,
)
from asyncrlhf.types import FloatArray, TrainBatch

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackend:
    """Trains ``model`` in place: float32 master weights, packed forward passes, exact gradients.

    The gradient of an optimizer update does not depend on how its sequences are spread over microbatches and ranks:
    every normaliser is counted over all of them first. Sequences whose advantage is zero for certain (groups without
    reward spread) take part in the normaliser and the metrics, and are spared the backward pass.

    Args:
        model: a loaded causal language model; it becomes float32 and moves to ``device``.
        reference: the frozen policy of the KL; needed exactly when ``algorithm.kl`` is not ``none``.
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
            raise ConfigError(f"algorithm.kl={algorithm.kl} needs a reference model, and the learner was given none.")
        self.config, self.algorithm, self.steps = config, algorithm, steps
        self.rank, self.ranks, self.device = rank, ranks, torch.device(device)
        self.temperature = temperature or 1.0
        self.constant_length = float(max_completion_length) if max_completion_length else None
        self.model = model.float().train()
        nn.Module.to(self.model, self.device)
        self.policy = PackedPolicy(self.model, compile=config.compile)
        self.critic = ValueModel(self.model) if algorithm.needs_critic else None
        self.reference = _frozen(reference, self.device) if algorithm.needs_reference and reference else None
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.optimizer = build_optimizer(config, self.policy, self.critic)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.mixed_precision == "float16")
        self._policy_ddp = self._distributed(self.policy)
        self._critic_ddp = None if self.critic is None else self._distributed(self.critic)
        self._rule = coefficient_rule(algorithm)
        self._dummy = PackedInputs.dummy(self.device)
        self._version = 0
        self._skipped_in_a_row = 0

    @property
    def policy_version(self) -> int:
        return self._version

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def before_update(self, callback: Callable[[], object]) -> None:
        def hook(*_: object) -> None:
            callback()

        self.optimizer.register_step_pre_hook(hook)

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One learner step on this rank's whole groups (``data.packing.shard``); an empty share is fine.

        Raises AsyncRLHFError after ``learner.max_skipped_steps`` steps in a row without a finite gradient.
        """
        started = time.perf_counter()
        rate = set_learning_rate(self.optimizer, schedule_factor(self.config, self._version, self.steps))
        plan = plan_step(batch, self.algorithm, self.config.token_budget, self.device)
        record = StepRecord.empty(len(plan.tokens.loss_mask), self.device)
        targets = self._targets(plan)
        if targets.proximal is not None:
            record.proximal = targets.proximal
        policy_counts = all_sum(normaliser_counts(plan, self.algorithm.aggregate, self.constant_length), self.ranks)
        token_counts = policy_counts
        if self.critic is not None:
            token_counts = all_sum(normaliser_counts(plan, "token", None), self.ranks)
        losses, norms, skipped = [], [], 0
        for iteration in range(self.algorithm.num_iterations):
            for index, minibatch in enumerate(plan.minibatches):
                losses.append(
                    self._accumulate(plan, minibatch, targets, record, policy_counts[index], token_counts[index])
                )
                norm = self._update()
                skipped += not math.isfinite(norm)
                norms.append(norm)
            if iteration == 0 and targets.proximal is None:
                record.proximal = record.policy.clone()
                targets = dataclasses.replace(targets, proximal=record.proximal)
        self._version += 1
        metrics = self._metrics(plan, targets, record, losses)
        metrics |= {"learning_rate": rate, "grad_norm": norms[-1], "skipped_updates": float(skipped)}
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
                logprobs, _ = self.policy(inputs, 1.0)
            scores.append(logprobs.float().cpu().numpy())
        return scores

    def save(self, folder: Path) -> None:
        """``model/`` in ``from_pretrained`` format and ``trainer.pt`` from rank 0, ``rank-R.pt`` from each rank."""
        state = {
            "version": self._version,
            "skipped_in_a_row": self._skipped_in_a_row,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
        }
        checkpoint.save(folder, self.model, state, self.rank)
        barrier(self.ranks)

    def load(self, folder: Path) -> None:
        """Go on from :meth:`save`, bit for bit; raises CheckpointError when a file is missing or does not fit."""
        state = checkpoint.load(folder, self.model, self.rank)
        if (state["critic"] is None) != (self.critic is None):
            raise CheckpointError(
                f"{folder}: the checkpoint and algorithm.advantage disagree on whether there is a critic."
            )
        self._version, self._skipped_in_a_row = state["version"], state["skipped_in_a_row"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        barrier(self.ranks)

    def _distributed(self, module: nn.Module) -> nn.Module:
        if self.ranks == 1:
            return module
        return DistributedDataParallel(module, broadcast_buffers=False)

    def _autocast(self) -> AbstractContextManager:
        dtype = AUTOCAST.get(self.config.mixed_precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @torch.no_grad()
    def _targets(self, plan: StepPlan) -> Targets:
        """Everything that must be known before the first update."""
        algorithm = self.algorithm
        proximal = ref = values = None
        if algorithm.minibatches > 1:
            proximal = self._forward_all(plan, lambda inputs: self.policy(inputs, self.temperature)[0])
        if self.reference is not None:
            reference = self.reference
            ref = self._forward_all(plan, lambda inputs: reference(inputs, self.temperature)[0])
        if self.critic is not None:
            values = self._forward_all(plan, self.critic)
        advantages, returns = compute_advantages(
            plan.tokens, algorithm, ref, values, lambda total: all_sum(total, self.ranks)
        )
        return Targets(advantages, returns, values, ref, proximal)

    def _forward_all(self, plan: StepPlan, forward: Callable[[PackedInputs], torch.Tensor]) -> torch.Tensor:
        result = torch.zeros(len(plan.tokens.loss_mask), device=self.device)
        for microbatch in plan.microbatches:
            with self._autocast():
                result[microbatch.span] = forward(microbatch.inputs).float()
        return result

    def _accumulate(
        self,
        plan: StepPlan,
        minibatch: Sequence[Microbatch],
        targets: Targets,
        record: StepRecord,
        policy_count: torch.Tensor,
        token_count: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of one optimizer update; returns policy and value loss [2] of this rank.

        Policy and critic go one after the other, so that the collectives of the two come in one order on all ranks.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(2, device=self.device)
        with torch.no_grad():
            for microbatch in minibatch:
                if not microbatch.trains:
                    self._policy_loss(self.policy, plan, microbatch, targets, record, policy_count)
        training = [microbatch for microbatch in minibatch if microbatch.trains]
        for microbatch in self._reducing(self._policy_ddp, training):
            loss = self._policy_loss(self._policy_ddp, plan, microbatch, targets, record, policy_count)
            self.scaler.scale(loss * self.ranks).backward()
            total[0] += loss.detach()
        if not training:
            logprobs, entropies = self._policy_ddp(self._dummy, 1.0)
            ((logprobs.sum() + entropies.sum()) * 0.0).backward()
        if self._critic_ddp is None:
            return total
        for microbatch in self._reducing(self._critic_ddp, training):
            loss = self._value_loss(self._critic_ddp, plan, microbatch, targets, token_count)
            self.scaler.scale(loss * self.algorithm.value_coef * self.ranks).backward()
            total[1] += loss.detach()
        if not training:
            (self._critic_ddp(self._dummy).sum() * 0.0).backward()
        return total

    def _reducing(self, module: nn.Module, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch]:
        """The microbatches, with the gradient reduction held back until the last one.

        DDP averages over ranks, hence each loss times the ranks. Every rank reduces exactly once however many
        microbatches it has; one without any sends the zeros of a dummy.
        """
        for microbatch in microbatches:
            with contextlib.ExitStack() as stack:
                if isinstance(module, DistributedDataParallel) and microbatch is not microbatches[-1]:
                    stack.enter_context(module.no_sync())
                yield microbatch

    def _policy_loss(
        self,
        module: nn.Module,
        plan: StepPlan,
        microbatch: Microbatch,
        targets: Targets,
        record: StepRecord,
        normaliser: torch.Tensor,
    ) -> torch.Tensor:
        with self._autocast():
            policy, entropy = module(microbatch.inputs, self.temperature)
        result = microbatch_loss(self.algorithm, self._rule, plan, microbatch, targets, policy, entropy, normaliser)
        record.policy[microbatch.span] = policy.detach()
        record.entropy[microbatch.span] = entropy.detach()
        record.clipped[microbatch.span] += result.clipped / self.algorithm.num_iterations
        return result.loss

    def _value_loss(
        self,
        module: nn.Module,
        plan: StepPlan,
        microbatch: Microbatch,
        targets: Targets,
        token_count: torch.Tensor,
    ) -> torch.Tensor:
        assert targets.old_values is not None and targets.returns is not None
        with self._autocast():
            values = module(microbatch.inputs)
        span = microbatch.span
        return value_loss(
            values,
            targets.old_values[span],
            targets.returns[span],
            plan.tokens.loss_mask[span],
            plan.tokens.sequence_ids[span] - microbatch.sequences.start,
            clip=self.algorithm.value_clip,
            normaliser=token_count,
            sample_weights=plan.tokens.weights[microbatch.sequences],
        )

    def _update(self) -> float:
        """Clip and apply the gradient; the policy's norm, or NaN when any rank found a gradient that is not finite."""
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradient(self.policy.parameters(), self.config.max_grad_norm)
        broken = ~torch.isfinite(norm)
        if self.critic is not None:
            broken |= ~torch.isfinite(clip_gradient(self.critic.parameters(), self.config.max_grad_norm))
        skip = bool(all_sum(broken.float(), self.ranks))
        if not skip:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return math.nan if skip else float(norm)

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
