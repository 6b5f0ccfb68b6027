"""Turns gradients into updates: optimizer, schedule, and the layouts of weights over the ranks."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.ranks import Peers, Shards, all_sum, by_layout, on_host, padded, whole
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.state import checkpoint
from asyncrlhf.learner.state.state_file import read_parts
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.learner.step.plan import Microbatch
from asyncrlhf.learner.updates.optimizers import build_optimizer
from asyncrlhf.models.adapter import is_adapter, published_tensors
from asyncrlhf.models.weight_files import WeightFiles

OWN_SETTINGS = ("base_lr", "weight_decay", "betas")  # of an optimizer's group: from the run's settings


def schedule_factor(config: LearnerConfig, step: int, steps: int) -> float:
    """The share of the learning rate at learner step ``step`` (from 0) of ``steps``: linear warm-up, then the schedule.

    ``linear`` and ``cosine`` would reach 0 one step after the last. A run that continues beyond ``steps`` stays at the
    rate of its last step.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    span = max(steps - warmup, 1)
    progress = min(step - warmup, span - 1) / span
    if config.lr_schedule == "linear":
        return 1.0 - progress
    if config.lr_schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """The gradient's norm over all its shards before clipping, 0-dim; ``max_norm`` 0 only measures."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(trained)
    scale_gradient(trained, max_norm, norm)
    return norm


def gradient_norm(trained: Sequence[nn.Parameter]) -> torch.Tensor:
    """The norm over all shards of the gradients, 0-dim; torch measures and scales tensors of one layout together."""
    parts = by_layout(trained)
    norms = [whole(nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])) for part in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def scale_gradient(trained: Sequence[nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Clip gradients of this ``norm``; ``max_norm`` 0 does nothing."""
    for part in by_layout(trained):
        nn.utils.clip_grads_with_norm_(part, max_norm or math.inf, norm)


class Updater(ABC):
    """The layout of policy and critic over the ranks, and how a gradient becomes an update.

    ``policy`` and ``critic`` are what forward passes call. All ranks call each method together.
    """

    policy: Any
    critic: Any = None
    optimizers: Sequence[Any]  # the policy's first; of torch's interface

    def __init__(
        self,
        config: LearnerConfig,
        model: transformers.PreTrainedModel,
        policy: nn.Module,
        critic: nn.Module | None,
        device: torch.device,
        ranks: int,
        files: WeightFiles | None = None,
    ) -> None:
        """``files``: of the model's weights, where its parameters, and so the critic's, are on the device ``meta``."""
        self.config, self.model, self.device, self.ranks, self.files = config, model, device, ranks, files
        # Called each time before the parameters change: a snapshot may still be read from them.
        self.before_update: Callable[[], object] = lambda: None
        self._lay_out(policy, critic)

    @abstractmethod
    def _lay_out(self, policy: nn.Module, critic: nn.Module | None) -> None:
        """Set ``policy``, ``critic`` and ``optimizers``."""

    @property
    def shards(self) -> Shards | None:
        """The policy's tensors if no rank holds them whole; else None."""
        return None

    def frozen(self, module: nn.Module) -> Any:
        """A module that is never updated, with the policy's layout over the ranks."""
        return module

    def looks(self, module: Any, microbatches: Sequence[Microbatch]) -> Iterable[Microbatch | None]:
        """The passes of ``module`` without gradient that this rank makes for ``microbatches``; None is one over dummy
        data."""
        return padded(microbatches, self.device, self.ranks) if self.config.sharded else microbatches

    @abstractmethod
    def trains(self, module: Any, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        """The passes with gradient of one update; each must end in :meth:`backward` before the next is requested."""

    @abstractmethod
    def begin(self) -> None:
        """Clear the gradients of the previous update."""

    @abstractmethod
    def backward(self, module: Any, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss`` [0-dim], which is one term of a sum over microbatches and ranks."""

    @abstractmethod
    def apply(self) -> torch.Tensor:
        """Clip and apply the gradient; the policy's norm [0-dim], or NaN when it was not finite on any rank and was
        dropped."""

    def set_rate(self, factor: float) -> float:
        """Scale every group's base rate by ``factor``; returns the policy's rate."""
        for group in self._groups():
            group["lr"] = group["base_lr"] * factor
        return float(self.optimizers[0].param_groups[0]["lr"])

    def settings(self) -> list[dict[str, Any]]:
        """The settings of each optimizer group that a checkpoint's state would overwrite."""
        return [{key: group[key] for key in OWN_SETTINGS if key in group} for group in self._groups()]

    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Restore the settings that :meth:`settings` returned."""
        for group, own in zip(self._groups(), settings, strict=True):
            group.update(own)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The policy's tensors by name, for publishing (tied tensors once, under their first name).

        With ``shards``: copies of all of them in rank 0's host memory, empty elsewhere.
        """
        if self.shards is None:
            return published_tensors(self.model)
        return on_host(self.shards, torch.distributed.get_rank())

    def save(self, folder: Path, state: dict[str, Any], rank: int, writer: StateWriter) -> None:
        """Write ``state``, this layout's own state and the random states (see ``checkpoint.write``), and the model in
        transformers' format: ``writer`` has copied all of it when this returns."""
        checkpoint.write(folder, state | self._save_own(folder, rank, writer), rank, writer)
        checkpoint.export_model(self.model, folder / checkpoint.MODEL, self.shards, rank, writer)

    @abstractmethod
    def _save_own(self, folder: Path, rank: int, writer: StateWriter) -> dict[str, Any]:
        """Write each rank's part of weights and optimizer; returns entries for rank 0's state, which must say if there
        is a critic."""

    @abstractmethod
    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Restore the files of :meth:`save`; raises CheckpointError if they do not fit."""


def _check_shapes(optimizer: Any) -> None:
    """Raise ValueError if a state with one number per weight has another shape than its parameter: torch checks that
    only in a step, or never."""
    for part in getattr(optimizer, "parts", [optimizer]):
        for parameter, states in part.state.items():
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                found = states.get(name)
                if isinstance(found, torch.Tensor) and found.shape != parameter.shape:
                    raise ValueError(f"{name} is {tuple(found.shape)}, its parameter {tuple(parameter.shape)}")


class TorchUpdater(Updater):
    """The ``Updater`` of plain torch: all ranks make an update of policy and critic, or skip it, together."""

    def _lay_out(self, policy: nn.Module, critic: nn.Module | None) -> None:
        self.policy = self.spread(policy)
        self.critic = None if critic is None else self.spread(critic)
        self._modules = [policy] if critic is None else [policy, critic]
        self.optimizer = build_optimizer(self.config, policy, critic)
        self.optimizers = [self.optimizer]
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.mixed_precision == "float16")

    def spread(self, module: nn.Module) -> nn.Module:
        """``module`` over the ranks."""
        return module if self.ranks == 1 else DistributedDataParallel(module, broadcast_buffers=False)

    def trains(self, module: nn.Module, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        """With the gradient reduction delayed until the last one: every rank must reduce exactly once, with any number
        of microbatches."""
        passes: list[Microbatch | None] = [*microbatches] or [None]
        for index, microbatch in enumerate(passes):
            last = index == len(passes) - 1
            with module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext():
                yield microbatch

    def begin(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, module: nn.Module, loss: torch.Tensor) -> None:
        """DistributedDataParallel and FSDP average over these ranks; the loss is a sum over them."""
        self._scaler.scale(loss * self.config.copies).backward()

    def clip(self, module: nn.Module) -> torch.Tensor:
        """As :func:`clip_gradient`."""
        return clip_gradient(module.parameters(), self.config.max_grad_norm)

    def apply(self) -> torch.Tensor:
        self._complete_gradients()
        self._scaler.unscale_(self.optimizer)
        norms = [self.clip(module) for module in self._modules]
        broken = all_sum(torch.stack([~torch.isfinite(norm) for norm in norms]).sum().float(), Peers(ranks=self.ranks))
        if self._drops_itself():
            self.before_update()
            self.optimizer.grad_scale, self.optimizer.found_inf = None, broken.clamp(max=1)
            self.optimizer.step()
        elif not bool(broken):
            self.before_update()
            self._scaler.step(self.optimizer)
        self._scaler.update()
        return torch.where(broken > 0, math.nan, norms[0])

    def _drops_itself(self) -> bool:
        """Whether the optimizer's kernel leaves out an update that is not finite, so that the host need not wait for
        the gradient to know: torch's fused AdamW on whole tensors."""
        plain = type(self.optimizer) is torch.optim.AdamW and not self.config.sharded and not self._scaler.is_enabled()
        return plain and all(group["fused"] for group in self._groups())

    def _complete_gradients(self) -> None:
        """Sum, once per update, gradients whose terms are on several ranks."""

    def _save_own(self, folder: Path, rank: int, writer: StateWriter) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "critic": None if self.critic is None else self._modules[1].state_dict(),
            "adapter": self.parameters() if is_adapter(self.parameters()) else None,
        }

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        try:
            self._load_weights(folder / checkpoint.MODEL, state.get("adapter"))
            if self.critic is not None:
                self._modules[1].load_state_dict(state["critic"])
        except (RuntimeError, OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{folder} does not hold this run's model: {error}") from error
        try:
            self.optimizer.load_state_dict(self._own_states(state["optimizer"], folder))
            _check_shapes(self.optimizer)
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{folder} holds another optimizer's states than learner.optim={self.config.optim} has: {error}."
            ) from error
        self._scaler.load_state_dict(state["scaler"])

    def _own_weights(self, saved: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of a whole model that this rank holds."""
        return saved

    def _own_states(self, saved: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        """This rank's part of the optimizer state that a plain rank saved, or the stages of a pipeline."""
        if "names" not in saved:
            return saved
        found = read_parts(sorted((folder / checkpoint.STAGES).glob("*.safetensors")), saved["names"])
        states = {place: found[name] for place, name in enumerate(saved["names"]) if name in found}
        return {"state": states, "param_groups": saved["param_groups"]}

    def _load_weights(self, folder: Path, adapter: Mapping[str, torch.Tensor] | None) -> None:
        """The exported model has the adapter merged, so a run that trains an adapter continues from the adapter itself.

        Only the folder's safetensors are read; other files there (a config, an adapter) have no effect.
        """
        if adapter is None:
            if (folder / "adapter_config.json").exists():
                raise ValueError(f"{folder} is an adapter")
            config = copy.deepcopy(self.model.config)
            options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True, "local_files_only": True}
            loaded: Any = type(self.model).from_pretrained(folder, config=config, dtype=torch.float32, **options)
            saved, found = loaded
            wrong = sorted(str(name) for kind in ("missing_keys", "unexpected_keys") for name in found[kind])
            if wrong:
                raise ValueError(f"{wrong[0]} is in one of the two alone")
            self.model.load_state_dict(self._own_weights(saved.state_dict()))
        elif self.model.load_state_dict(dict(adapter), strict=False).unexpected_keys:
            raise CheckpointError(
                f"{folder} is the checkpoint of an adapter, and this run trains none (model.lora.r=0)."
            )
