"""TRL's trainers without a model: built without __init__, fed with log-probs, asked for the gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

Array = NDArray[np.float64]

TRAINERS = {"grpo": GRPOTrainer, "gmpo": GMPOTrainer, "rloo": RLOOTrainer}

# What `_compute_loss` reads from the trainer and from its arguments, at the values that switch the extras off.
TRAINER_SETTINGS = {
    "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
    "beta": 0.0,
    "loss_type": "dapo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "max_completion_length": 1,
    "current_gradient_accumulation_steps": 1,
}
ARGUMENTS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
    "gradient_checkpointing_kwargs": None,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 1,
}


class _Accelerator(SimpleNamespace):
    """One process, on which gathering gives back what was given."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, x: Any) -> Any:
        return x

    def gather_for_metrics(self, x: Any) -> Any:
        return x

    def reduce(self, x: Any, reduction: str) -> Any:
        return x


def _trainer(kind: type, settings: dict[str, Any]) -> Any:
    trainer = object.__new__(kind)
    for name, value in TRAINER_SETTINGS.items():
        setattr(trainer, name, settings.pop(name, value))
    trainer.args = SimpleNamespace(**{name: settings.pop(name, value) for name, value in ARGUMENTS.items()})
    assert not settings, f"not a setting of TRL's that is read here: {sorted(settings)}"
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.accelerator = _Accelerator()
    trainer._metrics = {"train": defaultdict(list)}
    return trainer


def _tokens(mask: Tensor) -> dict[str, Tensor]:
    """A prompt of one token before completions whose holes are the tool's tokens; ids are never looked at."""
    rows = len(mask)
    attended = (mask.flip(1).cumsum(1).flip(1) > 0).long()
    return {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": attended,
        "tool_mask": mask,
    }


def gradient(
    trainer: str, theta: Array, old: Array, mask: Array, advantages: Array, inputs: dict[str, Array], **settings: Any
) -> Array:
    """d loss / d theta [N, L]. ``inputs`` are further tensors of TRL's batch, by TRL's names."""
    made = _trainer(TRAINERS[trainer], settings)
    leaf, loss_mask = torch.from_numpy(theta).requires_grad_(), torch.from_numpy(mask)
    made._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf, torch.zeros_like(leaf), None)
    batch = {
        **_tokens(loss_mask),
        "advantages": torch.from_numpy(advantages),
        "old_per_token_logps": torch.from_numpy(old),
        "num_items_in_batch": loss_mask.sum(),
        **{name: torch.from_numpy(array) for name, array in inputs.items()},
    }
    if trainer == "rloo":
        # It knows no tool mask, and keeps the sum over a completion.
        batch["completion_mask"] = loss_mask
        batch["old_logps"] = (torch.from_numpy(old) * loss_mask).sum(1)
    (found,) = torch.autograd.grad(made._compute_loss(made.model, batch), leaf)
    return found.numpy()


def scored(
    old: Array, sampled: Array, mask: Array, rewards: Array, group_size: int, scale_rewards: str, **importance: Any
) -> dict[str, Array]:
    """TRL's advantages [N] and, [N, L] or [N, 1], its correction for the sampler, as it makes them after generation."""
    made = _trainer(GRPOTrainer, {"use_vllm": True, "vllm_importance_sampling_correction": True})
    for name, value in {
        "environment_factories": None, "environments": None, "tools": None, "pad_to_multiple_of": None,
        "mask_truncated_completions": False, "num_iterations": 1, "num_generations": group_size,
        "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": scale_rewards, "reward_funcs": [None],
        "reward_func_names": ["reward"], "reward_weights": torch.ones(1), "log_multimodal": False,
        "_pending_extra_logs": {}, "_pending_metrics": {}, "_logs": defaultdict(lambda: defaultdict(list)),
        "_tokenizer": SimpleNamespace(pad_token_id=0), **importance,
    }.items():  # fmt: skip
        setattr(made, name, value)
    made._logs.update(prompt=[], completion=[], advantages=[])
    rows, length = mask.shape
    ids = [[0] * length] * rows
    kept = mask.astype(int).tolist()
    made._generate = lambda prompts: ([[0]] * rows, ids, kept, [""] * rows, sampled.tolist(), {}, None, None)
    made._get_per_token_logps_and_entropies = lambda *args, **kwargs: (torch.from_numpy(old), None, None)
    made._calculate_rewards = lambda *args: torch.from_numpy(rewards)[:, None]
    output = made._generate_and_score_completions([{"prompt": ""}] * rows)
    return {name: output[name].numpy() for name in ("advantages", "importance_sampling_ratio")}


def online_dpo_gradient(theta: Array, ref: Array, mask: Array, rewards: Array, loss_type: str, beta: float) -> Array:
    """d loss / d theta [2 B, L]; rows i and B + i are the two completions of prompt i."""
    made = object.__new__(OnlineDPOTrainer)
    leaf, loss_mask = torch.from_numpy(theta).requires_grad_(), torch.from_numpy(mask).long()
    ids = torch.zeros(loss_mask.shape, dtype=torch.long)
    model, found = SimpleNamespace(train=lambda: None), []
    accelerator = _Accelerator(backward=lambda loss: found.append(torch.autograd.grad(loss, leaf)[0].numpy()))
    for name, value in {
        "accelerator": accelerator, "ref_model": object(), "_beta": beta, "eos_token_ids": [1], "reward_funcs": [None],
        "stats": defaultdict(list), "state": SimpleNamespace(global_step=0),
        "processing_class": SimpleNamespace(batch_decode=lambda ids, **kwargs: [""] * len(ids)),
        "args": SimpleNamespace(
            use_vllm=True, missing_eos_penalty=None, loss_type=loss_type, torch_empty_cache_steps=None, optim="sgd",
            n_gpu=1, gradient_accumulation_steps=1,
        ),
        "_generate_vllm": lambda prompts, images: (ids[:, :1], loss_mask[:, :1], ids, loss_mask),
        "_forward": lambda used, *args: leaf if used is model else torch.from_numpy(ref),
        "_calculate_rewards_from_functions": lambda **kwargs: torch.from_numpy(rewards),
    }.items():  # fmt: skip
        setattr(made, name, value)
    made.training_step(model, {"prompt": [""] * (len(theta) // 2)})
    return found[0]
