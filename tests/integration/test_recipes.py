"""The recipes of ``conf/experiment`` for real models: composed as they are, and run with small local stand-ins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from asyncrlhf.cluster.parts import placement_plan
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.orchestrator.run import train
from tests.unit.rewards.worlds import save_reward_model

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "experiment"
# The GPUs that each recipe's first lines promise to be enough.
GPUS = {
    "tldr_pythia_410m": 4,
    "tldr_pythia_1b": 4,
    "tldr_pythia_2.8b": 5,
    "no_robots_8b": 8,
    "gsm8k_rho_1b": 4,
    "gsm8k_qwen_0.5b": 2,
    "gsm8k_qwen_1.5b": 3,
    "gsm8k_python_qwen3_1.7b": 3,
}
# What a published number was measured with: steps, batch, rate, responses a prompt, new tokens, beta, temperature.
PUBLISHED = {
    "tldr_pythia_410m": (256, 512, 3e-6, 2, 53, 0.1, 0.7),
    "tldr_pythia_1b": (256, 512, 3e-6, 2, 53, 0.1, 0.7),
    "tldr_pythia_2.8b": (256, 512, 3e-6, 2, 53, 0.1, 0.7),
    "no_robots_8b": (446, 224, 8e-7, 2, 1024, 0.03, 0.7),
    "gsm8k_rho_1b": (512, 256, 3e-6, 4, 512, 0.1, 0.7),
}


@pytest.fixture(autouse=True)
def all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composing must not ask for vLLM's build or for GPUs of this machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_recipe_for_gpus_is_looked_at() -> None:
    asking = {file.stem for file in FOLDER.glob("*.yaml") if "gpus:" in file.read_text() or file.stem in GPUS}
    assert asking == set(GPUS)


@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_fits_the_gpus_that_it_promises(name: str) -> None:
    config = load_config(
        [f"experiment={name}", "model.path=tiny"]
    )  # a plan with episodes asks for the context's length
    assert config.name == name
    assert placement_plan(config).total("GPU") <= GPUS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_papers_numbers(name: str) -> None:
    config = load_config([f"experiment={name}"])
    assert PUBLISHED[name] == (
        config.steps,
        config.batch_size,
        config.learner.learning_rate,
        config.num_generations,
        config.generator.max_completion_length,
        config.algorithm.beta,
        config.generator.temperature,
    )
    assert config.async_.mode == "one_step" and config.algorithm.name == "online_dpo"


def stand_ins(name: str, folder: Path, tiny: Path) -> list[str]:
    """The overrides that put local files and one CPU in the place of hub names and GPUs, and change nothing else."""
    config = load_config([f"experiment={name}"])
    model = folder / "policy"
    tiny = Path(resolve("tiny_tools")) if config.episode.used else tiny
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model.mkdir()
    for file in tiny.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    if config.task.chat_template and not config.episode.used:
        tokenizer.chat_template = "{% for m in messages %}{{ m.content if m.role == 'user' else '' }}{% endfor %}"
        tokenizer.save_pretrained(model)
    rows = [{config.task.prompt_key: f"{i}+7=", "answer": f"so it is\n#### {i + 7}"} for i in range(40)]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = ["task.prompt_template='{prompt}'"] if re.search("[A-Z]", config.task.prompt_template) else []
    reward = []
    if config.reward.kind == "model":
        scores = save_reward_model(folder / "reward", len(tokenizer), context=128)
        tokenizer.save_pretrained(scores)
        reward = [f"reward.model.path={scores}", "reward.model.dtype=float32", "reward.gpus=0"]
    return [
        f"experiment={name}",
        f"run_dir={folder / 'run'}",
        f"model.path={model}",
        f"task.path={data}",
        *("task.subset=", "task.heldout_split=", "task.heldout_size=4", *template),
        *("runtime=local", "generator.engine=hf", "generator.gpus=0", "generator.max_completion_length=6"),
        *("learner.backend=torch", "learner.zero_stage=0", "learner.ranks=1", "learner.gpus=0"),
        *(
            "logging.wandb=disabled",
            "logging.progress=none",
            "logging.report=false",
            "steps=2",
            f"batch_size={2 * config.num_generations}",
            "eval_every=0",
            "checkpoint.every=2",
        ),
        *reward,
    ]


@pytest.mark.in_turn
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.more_but("tldr_pythia_410m", "no_robots_8b")
@pytest.mark.thorough_but(every=2)
def test_a_recipe_runs_with_stand_ins(name: str, tmp_path: Path, tiny_model_path: Path) -> None:
    config: RunConfig = load_config(stand_ins(name, tmp_path, tiny_model_path))
    summary = train(config)
    assert summary["exit_reason"] == "done" and summary["steps"] == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [np.isfinite(row["loss"]) for row in rows] == [True, True]
