"""The models of one learner rank: policy, critic, slow copy and reference, laid out as the settings say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.model.activations import free_bytes, layers_to_repeat
from asyncrlhf.learner.model.forward import use_float32_head
from asyncrlhf.learner.model.halves import Halves, lower
from asyncrlhf.learner.model.model_pass import checkpoint_layers, compile_layers, decoder_layers, trunk_of
from asyncrlhf.learner.model.pipeline import Stage
from asyncrlhf.learner.model.sequence import ContextParallel
from asyncrlhf.learner.model.ulysses import Ulysses
from asyncrlhf.learner.ranks import deal_out, peers_along
from asyncrlhf.learner.settings.learner_config import BackendSpec
from asyncrlhf.learner.step.companions import ValueModel, frozen_copy, frozen_reference
from asyncrlhf.learner.step.passes import ForwardPasses
from asyncrlhf.learner.step.routing_replay import RoutingReplay
from asyncrlhf.learner.step.wall import check_shards, learner_policy, unlike_autocast
from asyncrlhf.learner.updates.deepspeed_updater import DeepSpeedUpdater
from asyncrlhf.learner.updates.fsdp_updater import FsdpUpdater
from asyncrlhf.learner.updates.pipeline_updater import PipelineUpdater
from asyncrlhf.learner.updates.updaters import TorchUpdater, Updater
from asyncrlhf.models.adapter import trained_tensors
from asyncrlhf.models.plain_pass import probe_texts
from asyncrlhf.models.weight_files import WeightFiles
from asyncrlhf.types import FloatArray

UPDATERS: dict[str, type[Updater]] = {"torch": TorchUpdater, "deepspeed": DeepSpeedUpdater}


class RankModels:
    """What a rank trains and compares with, and what their passes give.

    ``model`` is trained in place, as float32 weights, which the passes may see in another format.

    Args:
        model: a loaded causal language model; it becomes float32 and moves to ``device``.
        reference: the frozen policy of the KL or of a head; needed when ``algorithm.needs_reference``, unless its
            log-probs are served.
        files: of the weights of both, whose parameters are then on the device ``meta``
            (``LearnerConfig.in_rows``, see ``data.weight_files.load_blank``).
        rank, ranks: with ``ranks > 1`` torch.distributed must have been initialised, see ``init_process_group``.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        spec: BackendSpec,
        *,
        reference: transformers.PreTrainedModel | None = None,
        files: WeightFiles | None = None,
        rank: int = 0,
        ranks: int = 1,
        device: str | torch.device = "cpu",
    ) -> None:
        config, algorithm = spec.learner, spec.algorithm
        if algorithm.needs_reference and reference is None and not spec.reference_served:
            what = f"anchor={algorithm.anchor}" if algorithm.kl == "none" else f"kl={algorithm.kl}"
            raise ConfigError(f"algorithm.{what} needs a reference model, and the learner was given none.")
        self.config, self.algorithm = config, algorithm
        self.rank, self.ranks, self.device = rank, ranks, torch.device(device)
        self._peers, self.share_peers = deal_out(rank, ranks, ranks // config.shares)
        self.temperature = spec.temperature or 1.0
        self.model = model.float().eval()
        if config.float32_head:
            use_float32_head(self.model)
        if not config.sharded:  # the updater moves each part to the device as it partitions it
            nn.Module.to(self.model, self.device)
        texts = probe_texts(self.model)  # while it is whole
        self.policy, self.note = learner_policy(self.model, config, algorithm)
        # ZeRO-3 counts the backward passes through what a module returns, on all ranks alike.
        used = algorithm.entropy_coef > 0 or bool(algorithm.loss.target) or config.zero_stage == 3
        self.policy.entropy_trains = used
        by_autocast = self._casts_each_pass()
        # Ranks that gather a sharded model's weights in each call of it must call it equally often.
        self._token_budget = 1 if config.sharded and not self.policy.packing else config.token_budget
        self.critic = ValueModel(self.model) if algorithm.needs_critic else None
        self.ema = frozen_copy(self.policy, self.device) if algorithm.anchor == "ema" else None
        if config.gradient_checkpointing:
            for trunk in (self.model, *(() if self.critic is None else (self.critic.trunk,))):
                checkpoint_layers(trunk)
        if config.compile:
            compile_layers(self.model)
            self.policy.compiled = True
        self.replay = RoutingReplay(self.model) if config.routing_replay else None
        kind = FsdpUpdater if config.in_rows else UPDATERS[config.backend]
        kind = PipelineUpdater if config.pipeline_parallel_size > 1 else kind
        self.updater = kind(config, self.model, self.policy, self.critic, self.device, ranks, files)
        self.shards = self.updater.shards  # how to read the policy's tensors where no rank holds them whole; else None
        self._split_sequences()
        self.reference = None
        if reference is not None and algorithm.needs_reference:
            self.reference = self.updater.frozen(frozen_reference(reference, config, self.device, self.policy))
        self.halves = self._halved(by_autocast) if config.mixed_precision == "bfloat16" else []
        if config.gradient_checkpointing is None and self.device.type == "cuda":
            self._repeat_layers()
        self._passes = ForwardPasses(self.updater, self.temperature, config.mixed_precision, by_autocast, self.device)
        if self.shards is not None:
            check_shards(self._passes, self.updater.policy, texts, self._token_budget)

    def _casts_each_pass(self) -> bool:
        """Whether autocast casts the weights in each pass: for float16, and for a model that cannot do without."""
        unlike = unlike_autocast(self.policy, torch.bfloat16) if self.config.mixed_precision == "bfloat16" else ""
        if unlike:
            also = f"Passes in bfloat16 cast its weights again and again, by autocast: without, {unlike}."
            self.note = f"{self.note} {also}".strip()
        return bool(unlike) or self.config.mixed_precision == "float16"

    def _repeat_layers(self) -> None:
        """Repeat as many layers in the backward pass as the free memory asks for."""
        modules = [self.model, *([] if self.critic is None else [self.critic.trunk])]
        trained = sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad)
        free = free_bytes(self.device)
        # To come: gradients, also those of DistributedDataParallel; AdamW's moments; the passes' copies of the weights.
        left = free - trained * (12 + 4 * (self.ranks > 1) + 2 * bool(self.halves))
        layers = [layer for layer in decoder_layers(self.model) if hasattr(layer, "gradient_checkpointing")]
        count = layers_to_repeat(self.policy, layers, self.config.token_budget, left) if layers else 0
        if count:
            for module in modules:  # which pass one after the other
                checkpoint_layers(module, but=decoder_layers(module)[count:])
            also = f"{count} of {len(layers)} layers compute activations again: {free / 1e9:.1f} GB are free."
            self.note = f"{self.note} {also}".strip()

    def _split_sequences(self) -> None:
        config = self.config
        if (size := config.sequence_parallel_size * config.context_parallel_size) == 1:
            return
        ring = config.context_parallel_size > 1  # or the other one
        peers = peers_along(self.rank, self.ranks, size, config.tensor_parallel_size * config.expert_parallel_size)
        split = ContextParallel(peers) if ring else Ulysses(self.model, peers)
        for module in (self.policy, self.critic, self.ema if ring else None):
            if module is not None:
                module.sequence = split

    def _halved(self, by_autocast: bool) -> list[Halves]:
        """Let the passes see weights in bfloat16 where neither autocast nor the layout casts them."""
        config, dtype = self.config, torch.bfloat16
        if by_autocast:
            for part in (self.updater.policy, self.reference):
                if isinstance(part, Stage):
                    part.autocast = dtype
            return []
        seen: list[Any] = [self.ema.model] if self.ema is not None else []
        if not config.casts_weights:
            seen += [self.policy.model, *([] if self.critic is None else [self.critic])]
        if self.reference is not None and not config.in_rows and config.zero_stage < 3:
            lower(self.reference, dtype)
        return [Halves(module, getattr(module, "trunk", None) or trunk_of(module), dtype) for module in seen]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """As :meth:`Updater.parameters`."""
        return self.updater.parameters()

    def critic_parameters(self) -> Mapping[str, torch.Tensor]:
        """The critic's trained tensors by name, for a critic service; empty without a critic. Whole only where
        the learner is not sharded."""
        return {} if self.critic is None else trained_tensors(self.critic)

    def score(self, token_ids: Sequence[np.ndarray]) -> list[FloatArray]:
        """Log-probs of each token given those before it, at temperature 1, not at the learner's; [len-1] per text. All
        texts pass together, as in a step, so that a text that others change is found by comparing."""
        policy = self.policy.alone if self.shards is None else self.updater.policy
        return self._passes.score(policy, token_ids, self._token_budget)
