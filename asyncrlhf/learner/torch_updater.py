"""Updates of weights that lie whole on every rank: DistributedDataParallel, one AdamW, non-finite gradients dropped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from asyncrlhf.data.adapter import is_adapter
from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner import checkpoint
from asyncrlhf.learner.distributed import Peers, all_sum
from asyncrlhf.learner.learner_config import LearnerConfig
from asyncrlhf.learner.optim import Updater, build_optimizer, clip_gradient
from asyncrlhf.learner.plan import Microbatch
from asyncrlhf.learner.shards import export_model


class TorchUpdater(Updater):
    """The ``Updater`` of plain torch: all ranks make an update of policy and critic, or skip it, together."""

    def __init__(
        self,
        config: LearnerConfig,
        model: PreTrainedModel,
        policy: nn.Module,
        critic: nn.Module | None,
        device: torch.device,
        ranks: int,
    ) -> None:
        super().__init__(config, model, device, ranks)
        self.policy = self.spread(policy)
        self.critic = None if critic is None else self.spread(critic)
        self._modules = [policy] if critic is None else [policy, critic]
        self.optimizer = build_optimizer(config, policy, critic)
        self.optimizers = [self.optimizer]
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.mixed_precision == "float16")

    def spread(self, module: nn.Module) -> nn.Module:
        """``module`` over the ranks."""
        return module if self.ranks == 1 else DistributedDataParallel(module, broadcast_buffers=False)

    def trains(self, module: nn.Module, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        """With the gradient reduction held back until the last one: every rank must reduce exactly once, however many
        microbatches it has."""
        passes = [*microbatches] or [None]
        for index, microbatch in enumerate(passes):
            last = index == len(passes) - 1
            with module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext():
                yield microbatch

    def begin(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, module: nn.Module, loss: torch.Tensor) -> None:
        """DistributedDataParallel and FSDP average over ranks; the loss is meant as a sum, hence times the ranks."""
        self._scaler.scale(loss * self.ranks).backward()

    def apply(self) -> float:
        self._scaler.unscale_(self.optimizer)
        norms = [clip_gradient(module.parameters(), self.config.max_grad_norm) for module in self._modules]
        broken = sum((~torch.isfinite(norm)).float() for norm in norms)
        skip = bool(all_sum(torch.as_tensor(broken), Peers(ranks=self.ranks)))
        if not skip:
            self._settle()
            self._scaler.step(self.optimizer)
        self._scaler.update()
        return math.nan if skip else float(norms[0])

    def save(self, folder: Path, state: dict[str, Any], rank: int) -> None:
        own = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "critic": None if self.critic is None else self._modules[1].state_dict(),
            "adapter": self.parameters() if is_adapter(self.parameters()) else None,
        }
        checkpoint.write(folder, state | own, rank)
        export_model(self.model, folder / checkpoint.MODEL, None, rank)

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        try:
            self._load_weights(folder, state.get("adapter"))
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"{folder / checkpoint.MODEL} does not hold this run's model: {error}") from error
        if self.critic is not None:
            self._modules[1].load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])

    def _load_weights(self, folder: Path, adapter: Mapping[str, torch.Tensor] | None) -> None:
        """The exported model has the adapter merged, so that a run of an adapter goes on from the adapter itself."""
        if adapter is None:
            saved = type(self.model).from_pretrained(folder / checkpoint.MODEL, dtype=torch.float32)
            self.model.load_state_dict(saved.state_dict())
        elif self.model.load_state_dict(dict(adapter), strict=False).unexpected_keys:
            raise CheckpointError(
                f"{folder} is the checkpoint of an adapter, and this run trains none (model.lora.r=0)."
            )
