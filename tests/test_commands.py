"""Every command of README and docs: all are resolved without a start, a handful runs; `make docs-full` runs the rest.

A command is a line of a code block that begins with ``asyncrlhf``, ``make`` or ``ray job submit``. It runs as written,
in the page's own folder and after the commands above it, plus a suffix from ``SUFFIXES`` that makes it short.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrlhf.bench.run import BENCHMARKS
from asyncrlhf.cli.doctor import gpu_options
from asyncrlhf.cli.main import COMMANDS, main
from asyncrlhf.cli.plan import plan_parser
from asyncrlhf.cli.settings_help import settings_help
from asyncrlhf.config.compose import check_words, compose_config, load_config, split_config_dir, sweep_jobs
from asyncrlhf.config.conversion import from_hydra
from asyncrlhf.sweeps.plan import plan_sweep

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)  # what a page tells to write
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STARTS = ("asyncrlhf ", "make ", "ray job submit ")

# What never starts here, and why.
COMPOSED_ONLY = {
    r"^make ": "installs an environment; CI runs these targets",
    r"ray job submit|ray\.address=": "a cluster",
    r"gpus[=:]1|DEVICE=gpu|--gpu": "GPUs",
    r"Qwen/Qwen3-30B": "a model of the hub",
    r"=(TEACHER|STUDENT)\b": "checkpoints of the reader's own; tests/integration/test_distill.py has some",
    r"experiment=(tldr|no_robots)": "a model and a dataset of the hub",
    r"experiment=smollm2_reasoning": "a 135M model: minutes a step on two cores",
    r"^asyncrlhf watch": "a terminal; tests/integration/test_watch.py drives it",
    r"my_module:MySink": "a class of the reader's own; tests/unit/records/test_sinks.py has one",
    r"logging=online": "the W&B server",
    r"--from runs/|--profile profile": "a run of the reader's own; tests/integration/test_simulate.py has one",
    r"^asyncrlhf profile model": "a checkpoint of the reader's own; tests/integration/test_profile.py has one",
    r"^asyncrlhf plan --(gpus|compare )": "files of the reader's own; tests/integration/test_plan.py has some",
    r"^asyncrlhf bench templates": "minutes for each count; tests/unit/experiments/test_templates.py runs it small",
    r"reward\.model\.path=\./my-reward": "a reward model of the reader's own",
    r"cluster=(flatten|interleave)": "devices",
    r"^asyncrlhf bench overlap": "half an hour of alternated rounds; of the same sides",
}
TINY = "batch_size=16 task.heldout_size=4"
SMALL = f"{TINY} logging.wandb=disabled"
RAY = "ray.object_store_mb=128 generator.threads=0"
# Added to what matches first: "{}" where nothing is.
SUFFIXES = {
    r"--help|--list|^asyncrlhf (doctor|report|schema|status|verify)": "",
    r"^asyncrlhf evaluate": "task.heldout_size=4",
    r"^asyncrlhf preferences": "preferences.num_prompts=8 task.heldout_size=4 reward.kind=python "
    "reward.target=my_rewards:score logging.wandb=disabled",
    r"^asyncrlhf (sft|reward-model)": "{group}.max_steps=2 logging.wandb=disabled",
    r"experiment=staleness_quick logging": f"steps=2 {TINY} {RAY} eval_every=0 async.lag=0,4 sweep.parts.speed=null",
    r"experiment=staleness_quick": f"steps=2 {SMALL} {RAY} eval_every=0 async.lag=0,4 sweep.parts.speed=null",
    r"sweep\.search=": f"steps=2 {SMALL} sweep.trials=2 sweep.jobs=1",
    r"^asyncrlhf sweep": f"steps=2 {SMALL} runtime=local",
    r"checkpoint\.resume=auto": f"steps=4 {SMALL} {RAY}",
    r"learner\.ranks=8": f"steps=2 {SMALL.replace('16', '64', 1)} {RAY}",
    r"deepspeed": f"steps=2 {SMALL} {RAY} cluster.start_timeout_seconds=200",
    r"^asyncrlhf train": f"steps=2 {SMALL} {RAY}",
}
# Run by every `make test`: in this process, on the virtual clock.
QUICK = {
    "asyncrlhf train async.max_staleness=4 algorithm=tis seed=1": f"runtime=local steps=2 {SMALL}",
    "asyncrlhf train task=prompts task.path=my.jsonl reward.kind=python reward.target=my_rewards:score "
    "model.path=./my-model": f"runtime=local steps=2 {SMALL}",
    "asyncrlhf report runs/arithmetic/*": "",
    "asyncrlhf train --help async": "",
}
REWARDS = """def score(prompts, completions, answer=None, **columns):
    return [float(len(set(completion))) for completion in completions]
"""
LOSS = "def loss(inputs):\n    return -inputs.advantages * inputs.policy_logprobs\n"


def commands(page: Path) -> list[str]:
    found = []
    for language, block in BLOCK.findall(page.read_text()):
        if language not in ("", "bash", "sh"):
            continue
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            command = re.split(r"\s{2,}#|\s#\s", line)[0].strip()
            if command.startswith(STARTS):
                found.append(re.sub(r"\s+", " ", command))
    return found


ALL = [(page, command) for page in PAGES for command in commands(page)]
IDS = [f"{page.stem}-{number}" for number, (page, _) in enumerate(ALL)]


def first_match(table: dict[str, str], command: str) -> str | None:
    return next((value for pattern, value in table.items() if re.search(pattern, command)), None)


def resolve(words: Sequence[str]) -> None:
    """Raises for a command that does not exist, or whose settings do not compose to a config that passes."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        return
    if words[0] == "ray":
        words = words[words.index("--") + 1 :]
    assert words[0] == "asyncrlhf" and words[1] in COMMANDS, words
    verb, rest = words[1], [word for word in words[2:] if not word.startswith("run=")]
    if "--help" in rest:
        settings_help([word for word in rest if not word.startswith("-")])
    elif verb == "sweep" and "experiment=" in " ".join(rest):
        load_config([word for word in rest if not word.startswith("--")])  # tests/unit/sweeps counts the jobs of these
    elif verb == "sweep":
        plan_sweep([word for word in rest if not word.startswith("--")])
    elif verb == "bench":
        assert rest[0] in BENCHMARKS
    elif "--gpu" in rest:
        gpu_options(rest)
    elif verb in ("simulate", "profile"):
        load_config([word for word in rest[2:] if "=" in word])
    elif verb == "plan":
        load_config(plan_parser().parse_known_args(rest)[1])
    elif verb in ("schema", "report", "status", "verify", "watch"):
        assert all(not word.startswith("-") for word in rest)
    elif "-m" in rest:
        overrides, folder = split_config_dir([word for word in rest if word != "-m"])
        jobs = sweep_jobs(overrides)
        for job in (jobs[0], jobs[-1]):
            from_hydra(compose_config(job, folder))
    else:
        check_words(split_config_dir(rest)[0])
        load_config(rest)


def furnish(folder: Path, page: Path | None = None) -> None:
    """What the pages take for granted: a model, prompts, demonstrations, functions of the user's own; and what
    ``page`` tells to write."""
    folder.mkdir(exist_ok=True)
    chats = page is not None and page.stem in ("episodes", "your_own")  # they take a chat template for granted
    tiny = "tiny-tools" if chats else "tiny-arithmetic"
    for model in ("my-model", "BASE"):
        shutil.copytree(ROOT / "asyncrlhf" / "assets" / tiny, folder / model)
    for name, text in FILE.findall(page.read_text()) if page is not None else ():
        (folder / name).write_text(text)
    sums = [(f"{i}+{j}=", str(i + j)) for i in range(2, 9) for j in range(3, 9)]
    rows = [f'{{"prompt": "{q}", "answer": "{a}"}}' for q, a in sums]
    for name in ("my.jsonl", "prompts.jsonl"):
        (folder / name).write_text("\n".join(rows))
    (folder / "demos.jsonl").write_text("\n".join(f'{{"prompt": "{q}", "completion": "{a}"}}' for q, a in sums))
    (folder / "plans" / "experiment").mkdir(parents=True)
    (folder / "plans" / "experiment" / "mine.yaml").write_text("# @package _global_\nasync:\n  max_staleness: 3\n")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "my_loss.py").write_text(LOSS)


def test_there_are_commands_to_look_at() -> None:
    assert len(ALL) > 30 and {command for command in QUICK} <= {command for _, command in ALL}


@pytest.mark.more
def test_every_command_can_be_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path / "page")
    monkeypatch.chdir(tmp_path / "page")
    for page, command in ALL:
        try:
            resolve(shlex.split(command))
        except Exception as error:
            pytest.fail(f"{page.name}: {command}\n{type(error).__name__}: {error}")


def test_every_command_runs_somewhere_or_says_why_not() -> None:
    lost = [c for _, c in ALL if first_match(COMPOSED_ONLY, c) is None and first_match(SUFFIXES, c) is None]
    assert lost == []


def test_a_handful_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path / "page")
    monkeypatch.chdir(tmp_path / "page")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for command, suffix in QUICK.items():
        words = [str(p) for word in shlex.split(command)[1:] for p in (sorted(Path().glob(word)) or [word])]
        assert main([*words, *suffix.split()]) == 0, command
    assert (tmp_path / "page" / "report" / "index.html").is_file() or list((tmp_path / "page").rglob("index.html"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """A page's folder, in which its commands run one after the other."""
    made = {page: tmp_path_factory.mktemp(page.stem) / "page" for page in PAGES}
    for page, folder in made.items():
        furnish(folder, page)
    reporting = [page for page, command in ALL if command.startswith("asyncrlhf report")]
    for page in dict.fromkeys(reporting):
        furnish_runs(made[page])
    return made


def furnish_runs(folder: Path) -> None:
    """Runs and a sweep, which pages that speak of reports take for granted."""
    tiny = ["runtime=local", "steps=2", *SMALL.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed in (0, 1):
            assert main(["train", *tiny, f"seed={seed}"]) == 0
        assert main(["sweep", "async.max_staleness=1,2", *tiny]) == 0
        next((folder / "runs" / "sweeps").iterdir()).rename(folder / "runs" / "sweeps" / "NAME-HASH")


@pytest.mark.thorough
@pytest.mark.parametrize(("page", "command"), ALL, ids=IDS)
def test_the_command_runs(page: Path, command: str, folders: dict[Path, Path]) -> None:
    reason = first_match(COMPOSED_ONLY, command)
    if reason is not None:
        pytest.skip(f"resolved only: {reason}")
    suffix = (first_match(SUFFIXES, command) or "").replace("{group}", command.split()[1].replace("-", "_"))
    line = f"{command} {suffix}".replace("asyncrlhf ", f"{sys.executable} -m asyncrlhf ", 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folders[page], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("DEVICE=gpu",), "train cluster=one_gpu"),
        (("DEVICE=gpu", "ARGS=steps=2"), "train cluster=one_gpu steps=2"),
        (("DEVICE=gpu", "ARGS=cluster=flatten"), "train cluster=flatten"),
        (("DEVICE=gpu", "ARGS=runtime=local"), "train runtime=local"),
        (("DEVICE=cpu",), "train"),
    ],
)
def test_make_train_uses_a_card_unless_its_arguments_place_the_run(words: Sequence[str], expected: str) -> None:
    # Not those of the `make test ARGS=...` that runs this, which exports its variables too.
    given = ("MAKE", "MFLAGS", "ARGS", "DEVICE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    line = ["make", "--no-print-directory", "-n", "train", *words]
    said = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert " ".join(said.stdout.splitlines()[-1].split()).endswith(f"asyncrlhf {expected}")
