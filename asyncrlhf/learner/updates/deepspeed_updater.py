"""The train step on DeepSpeed: ZeRO engines, and exact sums over microbatches of different sizes."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.model.forward import TokenFacts
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.loading import hold_places, in_turn
from asyncrlhf.learner.ranks import Part, Shards, barrier, init_single_process_group, padded
from asyncrlhf.learner.settings.learner_config import LearnerConfig
from asyncrlhf.learner.state import checkpoint
from asyncrlhf.learner.state.state_file import read_state
from asyncrlhf.learner.state.state_writer import StateWriter
from asyncrlhf.learner.step.plan import Microbatch
from asyncrlhf.learner.updates.optimizers import build_optimizer
from asyncrlhf.learner.updates.updaters import Updater, clip_gradient

FOLDER = "deepspeed"  # of a checkpoint: what the engines write


class _OneTensor(nn.Module):
    """A policy that returns its facts as one tensor [2 to 4, M].

    ZeRO-3 hooks every tensor that a module returns and counts the backward passes through each. Ranks whose losses use
    different tensors would gather in different orders and deadlock.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, inputs: PackedInputs, temperature: float) -> torch.Tensor:
        return self.policy(inputs, temperature).stacked()


class _Typed(nn.Module):
    """Represents a module while DeepSpeed partitions its parameters; they are converted to ``dtype`` one by one."""

    def __init__(self, parameters: Iterator[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__()
        self._given, self._dtype = parameters, dtype

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self._given:
            parameter.data = parameter.data.to(self._dtype)
            yield parameter


class _Unpacked:
    """Calls the engine around a ``_OneTensor`` and returns its facts as separate tensors."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __call__(self, inputs: PackedInputs, temperature: float) -> TokenFacts:
        return TokenFacts.unstacked(self.engine(inputs, temperature), inputs.kept is not None)


class _ZeroShards(Shards):
    """ZeRO-3 flattens each tensor and gives each rank one range of it, all of one length; the last are padded."""

    def parts(self) -> dict[str, Part]:
        found = {}
        for name, parameter in self._model.named_parameters():
            own: Any = parameter
            first = min(own.ds_tensor.ds_numel * torch.distributed.get_rank(own.ds_process_group), own.ds_numel)
            last = min(first + own.ds_tensor.ds_numel, own.ds_numel)
            values = own.ds_tensor.detach().flatten()[: last - first]
            found[name] = Part(values, (own.ds_numel,), [[[first, last]] if last > first else []])
        return found


class _StateFiles:
    """DeepSpeed's ``CheckpointEngine`` on top of ``state_file``: DeepSpeed's own reads pickles, which may run code. The
    files are safetensors under the names ``*.pt`` that DeepSpeed expects."""

    def __init__(self, engine: Any, writer: StateWriter | None = None) -> None:
        self._engine, self._writer = engine, writer

    def save(self, state_dict: Any, path: str) -> None:
        """Without objects that are not values (settings, loss scaler, slice maps); the loading engine has its own."""
        assert self._writer is not None
        self._writer.write_state(Path(path), state_dict, whole=False)

    def load(self, path: str, map_location: Any = None) -> Any:
        state = read_state(Path(path))
        if isinstance(own := state.get("optimizer_state_dict"), dict):
            own.setdefault("loss_scaler", self._engine.optimizer.loss_scaler)
        return state

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def create(self, info: Any) -> None: ...

    def commit(self, info: Any) -> bool:
        return True

    def cleanup(self) -> None: ...

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        return False

    def is_data_parallel_writer(self, rank: int) -> bool:
        return rank == 0


class DeepSpeedUpdater(Updater):
    """The ``Updater`` over ``deepspeed.initialize``: one engine for the policy, one for the critic.

    The loss is a sum that is already normalised and must not be divided again: the factor cancels DeepSpeed's average
    over ranks, and DeepSpeed is told where an update ends instead of counting microbatches. From stage 2 on each
    backward pass is collective, at stage 3 each forward pass too: ranks with fewer microbatches make passes over dummy
    data.

    Policy and critic drop a gradient that is not finite separately, except at stage 0, where both are dropped.

    The step equals that of the other updaters up to rounding (``learner.zero_stage`` 0 to 3; ZeRO, 1910.02054). Critic
    and reference are sharded like the policy. Every rank holds the whole slow target network. With files, rank 0 reads
    one tensor after the other and each rank keeps its part; without files, each rank gets the whole model.
    """

    def _lay_out(self, policy: nn.Module, critic: nn.Module | None) -> None:
        config, device = self.config, self.device
        init_single_process_group(device)
        self._deepspeed = _import_deepspeed(device)
        # On torch's group, before any code asks DeepSpeed for the number of ranks.
        self._deepspeed.init_distributed(auto_mpi_discovery=False)
        self._stage = config.zero_stage
        hidden = self.model.config.get_text_config().hidden_size
        parameters = sum(p.numel() for p in self.model.parameters())
        self._settings = engine_settings(config, self.ranks, device, hidden, parameters)
        for module in (policy, critic):
            if module is not None and self.files is not None:
                hold_places(module)
        engine = self._engine(_OneTensor(policy), build_optimizer(config, policy, None))
        self._engines = {"policy": engine}
        self.policy = _Unpacked(engine)
        if critic is not None:
            self.critic = self._engines["critic"] = self._engine(critic, build_optimizer(config, None, critic))
        self.optimizers = [engine.optimizer for engine in self._engines.values()]

    @property
    def shards(self) -> Shards | None:
        return _ZeroShards(self.model, self._deepspeed.zero.GatheredParameters) if self._stage == 3 else None

    def frozen(self, module: nn.Module) -> Any:
        if self._stage != 3:
            return module
        if self.files is not None:
            hold_places(module)
        return _Unpacked(self._engine(_OneTensor(module), None))

    def trains(self, module: Any, microbatches: Sequence[Microbatch]) -> Iterator[Microbatch | None]:
        engine = self._engine_of(module)
        passes: list[Microbatch | None] = [*microbatches]
        if self._stage >= 2:
            passes = padded(microbatches, self.device, self.ranks)
        passes = passes or [None]
        for index, microbatch in enumerate(passes):
            engine.set_gradient_accumulation_boundary(index == len(passes) - 1)
            yield microbatch

    def begin(self) -> None:
        """Does nothing: every update, applied or dropped, clears its gradients."""

    def backward(self, module: Any, loss: torch.Tensor) -> None:
        self._engine_of(module).backward(loss * self.ranks, scale_wrt_gas=False)

    def apply(self) -> torch.Tensor:
        self.before_update()
        if self._stage == 0:
            return self._apply_whole()
        for engine in self._engines.values():
            engine.step()
        if any(engine.optimizer.overflow for engine in self._engines.values()):
            return torch.tensor(math.nan, device=self.device)
        return torch.as_tensor(self._engines["policy"].get_global_grad_norm(), device=self.device)

    def _save_own(self, folder: Path, rank: int, writer: StateWriter) -> dict[str, Any]:
        barrier(self.ranks)
        for name, engine in self._engines.items():
            engine.checkpoint_engine = _StateFiles(engine, writer)
            engine.save_checkpoint(str(folder / FOLDER), tag=name, save_latest=False)
        for script in (folder / FOLDER).glob("zero_to_*.py") if rank == 0 else ():
            script.unlink()  # DeepSpeed's own, which read its own files
        return {"critic": None if self.critic is None else True, "ranks": self.ranks}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        if state["ranks"] != self.ranks:
            raise CheckpointError(
                f"{folder}: the checkpoint's shards are those of learner.ranks={state['ranks']}; they cannot be read "
                f"with learner.ranks={self.ranks}, but the weights alone can, by "
                f"model.path={folder / checkpoint.MODEL}."
            )
        for name, engine in self._engines.items():
            engine.checkpoint_engine = _StateFiles(engine)
            try:
                found, _ = engine.load_checkpoint(str(folder / FOLDER), tag=name)
            except (RuntimeError, OSError, AssertionError) as error:
                raise CheckpointError(f"{folder / FOLDER} does not hold this run's {name}: {error}") from error
            if found is None:
                raise CheckpointError(f"{folder / FOLDER / name} is missing: not a whole learner checkpoint.")

    def _engine(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        buffers = [
            (owner, name, buffer.to(self.device, copy=True))
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        if self._stage == 3:
            self._partition(module)
        engine, *_ = self._deepspeed.initialize(
            model=module, optimizer=optimizer, config=self._settings, dist_init_required=False
        )
        for owner, name, buffer in buffers:
            setattr(owner, name, buffer)  # bfloat16 would round the frequencies of rotary embeddings
        return engine

    def _partition(self, module: nn.Module) -> None:
        """Partition the weights one by one as they move to the device; ``initialize`` would first move all of them.

        Decoder layers are gathered as a whole later. Inside a layer, autograd's order depends on the batch's shape, and
        ranks that gather in different orders deadlock.
        """
        if self.model._no_split_modules:
            self._deepspeed.utils.set_z3_leaf_modules(module, list(self.model._no_split_modules))
        dtype = torch.bfloat16 if "bf16" in self._settings else torch.float32
        parameters = module.parameters()
        if self.files is not None:
            inner = module.policy if isinstance(module, _OneTensor) else module
            parameters = in_turn(inner, self.files, self.model, reads=torch.distributed.get_rank() == 0)
        self._deepspeed.zero.Init(module=_Typed(parameters, dtype), config_dict_or_path=self._settings, dtype=dtype)

    def _apply_whole(self) -> torch.Tensor:
        """Apply the update at stage 0, which does not check for finite gradients and measures no norm; after the
        reduction the gradients are the same on all ranks."""
        limit = self.config.max_grad_norm
        norms = [clip_gradient(engine.module.parameters(), limit) for engine in self._engines.values()]
        finite = all(bool(torch.isfinite(norm)) for norm in norms)
        for engine in self._engines.values():
            if finite:
                engine.step()
            else:
                engine.zero_grad()
        return norms[0] if finite else torch.tensor(math.nan, device=self.device)

    def _engine_of(self, module: Any) -> Any:
        return module.engine if isinstance(module, _Unpacked) else module


BUCKET = 500_000_000  # DeepSpeed's own reduce_bucket_size


def engine_settings(
    config: LearnerConfig, ranks: int, device: torch.device, hidden_size: int, parameters: int
) -> dict[str, Any]:
    """DeepSpeed's config. With bfloat16, from stage 1 on the weights are bfloat16 with sharded float32 masters; at
    stage 0, whose gradients would be bfloat16, they are float32, and the passes see copies of them."""
    stage = config.zero_stage
    # In elements. Each engine allocates all of it: 2 GB of float32, even if the gradients take a few megabytes.
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": min(BUCKET, parameters)}
    pinned = {"device": "cpu", "pin_memory": device.type == "cuda"}
    if config.zero_offload != "none":
        zero["offload_optimizer"] = pinned
    if config.zero_offload == "cpu_params":
        zero["offload_param"] = pinned
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 10 * hidden_size  # norms and biases stay whole
    settings: dict[str, Any] = {
        # More than 1, so that DeepSpeed makes room for accumulation; the updater says where an update ends.
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 2 * ranks,
        "gradient_clipping": config.max_grad_norm if stage else 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW updates on the host too, with nothing to compile
    }
    if config.mixed_precision == "bfloat16" and stage:
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings


def _import_deepspeed(device: torch.device) -> Any:
    """The package, which reads its device from the environment at import. A Ray actor sees only its own GPU, number
    0."""
    os.environ.setdefault("LOCAL_RANK", "0")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # takes seconds, and only this backend needs it
    import deepspeed.ops

    # Only inference with tensor parallelism uses this op, which DeepSpeed would compile for a minute on a new machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # A warning about DeepSpeed's code, which torch repeats at each call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed
