"""Nonsense on the command line is one sentence and exit code 2, before anything heavy is imported or started."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hydra import compose, initialize_config_dir

from asyncrlhf.cli import train
from asyncrlhf.cli.main import main
from asyncrlhf.config.compose import load_config, sweep_jobs
from asyncrlhf.config.conversion import conf_folder
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.orchestrator.start.preflight import check_penalties
from asyncrlhf.validation import check_range

ROOT = Path(__file__).resolve().parents[3]

# What is typed after `asyncrlhf train`, and the words that the one sentence must have.
NONSENSE = [
    ("learner.gradient_checkpointing=3", ["learner.gradient_checkpointing=3 is of the wrong kind; allowed: true or"]),
    ("checkpoint.at_end=-1", ["checkpoint.at_end=-1 is of the wrong kind; allowed: true or false."]),
    ("async.adaptive='2'", ["async.adaptive=2 is of the wrong kind; allowed: true or false."]),
    ("generator.groups={a:{vllm:{enable_lora:3}}}", ["generator.groups.a.vllm.enable_lora=3 is of the wrong kind"]),
    ("stpes=5", ["stpes is not a setting", "did you mean steps?", "batch_size"]),
    ("async.max_stalenes=1", ["did you mean async.max_staleness?", "allowed in async: adaptive, "]),
    ("generator.fake.latency_sgma=1", ["did you mean generator.fake.latency_sigma?"]),
    ("max_staleness=1", ["did you mean async.max_staleness?"]),
    ("async_.max_staleness=1", ["did you mean async.max_staleness?"]),
    ("steps.more=1", ["steps.more is not a setting", "steps holds a single value"]),
    ("task.dataset_options.chain_sum=1", ["++task.dataset_options.chain_sum"]),
    ("foo.bar=1", ["foo is not a setting", "allowed here: algorithm, async, "]),
    ("++foo=1", ["foo is not a setting"]),
    ("+steps=1", ["steps is already a setting", "without a plus sign"]),
    ("~nothing", ["nothing"]),
    ("algorithm=grppo", ["algorithm=grppo is not known", "did you mean grpo?", "allowed: a3po, "]),
    ("async=5", ["async=5 is not known", "allowed: adaptive, async, fill, fixed_lag, one_step, sync."]),
    ("generator=", ["generator= is not known", "allowed: fake, hf"]),
    ("experiment=nothing", ["experiment=nothing is not known"]),
    ("nogroup/x=1", ["nogroup"]),
    ("steps=abc", ["steps=abc", "allowed: a whole number."]),
    ("steps=1.5", ["steps=1.5", "allowed: a whole number."]),
    ("steps=", ["steps", "allowed: a whole number."]),
    ("steps=[1,2]", ["steps", "allowed: a whole number."]),
    ("steps=null", ["steps=null", "allowed: a whole number."]),
    ("steps=${nothing}", ["steps refers to", "nothing"]),
    ("learner.learning_rate=fast", ["learner.learning_rate=fast", "allowed: a number."]),
    ("learner.compile=maybe", ["learner.compile", "allowed: true or false."]),
    ("task.operations=plus", ["task.operations", "allowed: a list"]),
    ("generator.fake=3", ["generator.fake=3", "generator.fake.NAME=VALUE"]),
    ("async.max_staleness=many", ["async.max_staleness=many", "allowed: a whole number."]),
    *((f"async={mode} async.{name}={value}",
       [f"async.{name}={value} contradicts async.mode={mode}, which {own}; leave it out, or give async.mode={other}."])
      for mode, name, own, other in (
          ("sync", "max_staleness", "itself sets it to 0", "async"),
          ("sync", "lag", "itself sets it to 0", "fixed_lag"),
          ("one_step", "max_staleness", "itself sets it to 1", "async"),
          ("one_step", "lag", "itself sets it to 1", "fixed_lag"),
          ("fixed_lag", "max_staleness", "itself sets it to 4", "async"),
          ("async", "lag", "has none", "fixed_lag"),
      ) for value in (0, 1, 4)),
    ("async.max_staleness=-1", ["async.max_staleness=-1", "allowed: >= 0."]),
    ("async.mode=asynk", ["async.mode=asynk", "did you mean async?", "one_step"]),
    ("learner.learning_rate=nan", ["learner.learning_rate=nan", "allowed: >= 0."]),
    ("learner.learning_rate=inf", ["learner.learning_rate=inf", "finite"]),
    ("learner.adam_beta2=1.0", ["learner.adam_beta2=1.0", "allowed: >= 0 and < 1."]),
    ("generator.top_p=1.5", ["generator.top_p=1.5", "allowed: > 0 and <= 1."]),
    ("generator.min_p=1", ["generator.min_p=1", "allowed: >= 0 and < 1."]),
    ("generator.temperature=0", ["generator.temperature=0", "allowed: > 0."]),
    ("seed=-1", ["seed=-1", "2147483647"]),
    ("name=a/b", ["name='a/b'", "slash"]),
    ("num_generations=1 algorithm=rloo", ["num_generations=1", "algorithm=rloo", "allowed: >= 2."]),
    ("batch_size=12", ["batch_size=12", "num_generations=8"]),
    ("algorithm=grpo_mu algorithm.correction=mask", ["algorithm.anchor=mu", "allowed: "]),
    (
        "algorithm=rloo algorithm.kl=reward algorithm.beta=1 algorithm.kl_estimator=k3",
        ["algorithm.kl_estimator=k3 is no penalty under algorithm.kl=reward", "allowed: k1 or auto, or kl=loss."],
    ),
    ("algorithm=ppo algorithm.truncated=cut", ["algorithm.truncated=cut", "keep, mask, bootstrap"]),
    ("algorithm.truncated=bootstrap", ["truncated=bootstrap needs a critic", "allowed: keep or mask"]),
    ("async.over_stale=mask algorithm=tba", ["async.over_stale=mask", "algorithm.head=regress", "allowed: over_stale"]),
    ("async.over_stale=mask algorithm=gspo", ["async.over_stale=mask", "algorithm.level=geo"]),
    ("async.over_stale=mask algorithm=seq_mask", ["async.over_stale=mask", "algorithm.correction_level=prod"]),
    ("async.over_stale=mask algorithm=gmpo", ["async.over_stale=mask", "algorithm.coef=geoclip"]),
    (
        "buffer.filter_zero_spread=true algorithm.kl=reward algorithm.beta=1",
        ["buffer.filter_zero_spread=true compares scores alone", "allowed: filter_zero_spread=false, or kl=loss."],
    ),
    (
        "buffer.filter_zero_spread=true algorithm=flash_reinforce",
        ["filter_zero_spread=true compares siblings", "allowed: filter_zero_spread=false, or advantage=group_mean."],
    ),
    ("algorithm=flash_reinforce num_generations=1 batch_size=1", ["batch_size=1", "batch_mean", "allowed: >= 2."]),
    ("async.over_stale=mask algorithm=flash_reinforce", ["async.over_stale=mask", "algorithm.gate=binary_kl"]),
    *((f"algorithm=maxrl {given}", [f"{given} brings rewards below 0", "allowed: without it, or another advantage."])
      for given in ("reward.normalize=batch", "reward.missing_eos_penalty=0.5", "reward.overlong_buffer=4")),
    ("learner.ranks=2 runtime=local", ["runtime=local", "learner.ranks=2"]),
    ("runtime=ray weights.transport=local", ["weights.transport=local", "object_store"]),
    ("async.pacing=jit", ["async.pacing=jit is not known", "just_in_time"]),
    ("async=fixed_lag async.pacing=just_in_time", ["async.mode=fixed_lag", "allowed: fill, or mode=async."]),
    ("async.pacing=just_in_time buffer=freshest", ["buffer.sampling=lifo", "allowed: pacing=fill, or buffer=fifo."]),
    ("weights.publish_every=5", ["weights.publish_every=5", "async.max_staleness=2"]),
    ("task=prompts", ["task.path"]),
    ("reward=python", ["reward.target=package.module:function"]),
    ("reward=model", ["reward.kind=model needs reward.model.path"]),
    ("reward=judge", ["reward.judge.model is empty"]),
    ("reward=http", ["reward.http.url=", "http://HOST:PORT/PATH"]),
    ("reward=http reward.http.url=localhost:80", ["reward.http.url=localhost:80", "http://HOST:PORT/PATH"]),
    ("reward=sum ++reward.parts.rm.knd=model", ["reward.parts.rm.knd is not a setting", "weight"]),
    ("reward=sum ++reward.parts.rm.kind=modle", ["reward.parts.rm.kind=modle", "did you mean model?", "length"]),
    ("reward=sum ++reward.parts.rm.http.urll=x", ["reward.parts.rm.http.urll is not a setting", "breaker_failures"]),
    ("reward=sum ++reward.parts.rm.weight=much", ["reward.parts.rm.weight", "much"]),
    ("reward=sum ++reward.parts.rm.weight=nan", ["reward.parts.rm.weight=nan", "finite"]),
    ("reward=sum ++reward.parts.rm.model.dtype=int4", ["reward.parts.rm.model.dtype=int4", "bfloat16"]),
    ("reward=sum ++reward.parts.rm=3", ["reward.parts.rm=3", "settings of its own"]),
    ("reward=sum ++reward.parts.overlong.kind=task", ["reward.parts.overlong", "penalty"]),
    ("reward.kind=sum", ["reward.kind=sum needs reward.parts"]),
    ("reward.kind=length", ["reward.kind=length is not known", "sum"]),
    ("reward.normalize=mean", ["reward.normalize=mean", "running"]),
    ("reward.normalize_clip=3", ["reward.normalize_clip=3", "reward.normalize"]),
    ("reward.max_batch_tokens=0", ["reward.max_batch_tokens=0", ">= 1"]),
    ("reward=http reward.http.url=http://h reward.http.retries=-1", ["reward.http.retries=-1", ">= 0"]),
    ("reward.model.chat_template=true reward.model.inputs=ids", ["reward.model.chat_template=true", "text"]),
    ("model.path=", ["model.path is empty", "tiny"]),
    ("logging.report=loud", ["logging.report=loud", "allowed: true or false."]),
    ("steps", ["steps is not a setting", "key=value"]),
    ("--bogus steps=1", ["--bogus is not an option", "key=value"]),
    ("--cfg", ["allowed: job, hydra, all."]),
    ("--cfg everything", ["--cfg everything", "allowed: job, hydra, all."]),
    ("--cfg job stpes=5", ["stpes is not a setting"]),
    ("--config-dir", ["--config-dir needs a folder"]),
    ("--config-dir=nowhere", ["--config-dir nowhere"]),
    ("hydra.run.dir=x", ["hydra.run.dir=x", "-m"]),
    ("seed=0,1", ["seed=0,1", "add -m", "seed=[a,b]"]),
    ("model.path='", ["model.path='", "quotes"]),
    ("-m stpes=1,2", ["stpes is not a setting"]),
    ("-m seed=0,-1", ["seed=-1 is out of range"]),
    ("-m seed=0,1 steps", ["steps is not a setting"]),
    ("-m seed='", ["seed='", "quotes"]),
    ("-m hydra/launcher=nothing", ["hydra/launcher=nothing is not known"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(config: object) -> int:
        pytest.fail("a run was started")

    monkeypatch.setattr(train, "run", started)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a command that ends with exit code 2 and leaves nothing in the current folder."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("asyncrlhf: ") and err.count("\n") == 1, err
    assert list(Path.cwd().iterdir()) == []
    for foreign in ("full_key", "object_type", "provider=", "https://", "Traceback", "HYDRA_FULL_ERROR"):
        assert foreign not in err
    return err


@pytest.mark.parametrize(("typed", "words"), NONSENSE, ids=[typed for typed, _ in NONSENSE])
@pytest.mark.more_but(every=4)
def test_nonsense_is_one_sentence(typed: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "train", *typed.split(" "))
    assert [word for word in words if word not in sentence] == [], sentence
    assert "async_." not in sentence.replace("async_.max_staleness is", "").replace("async_ is", "")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("trian", ["trian is not a command", "did you mean train?", "doctor"]),
        ("evaluate stpes=5", ["stpes is not a setting"]),
        ("evaluate tiny", ["tiny is not a setting", "key=value"]),
        ("evaluate run=nowhere", ["run=nowhere", "config.yaml"]),
        ("report", ["report: ", "RUN"]),
        ("report --colour=red RUN", ["--colour=red"]),
        ("report nowhere", ["nowhere is not a folder"]),
    ],
)
def test_other_commands_refuse_alike(typed: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, *typed.split())
    assert [word for word in words if word not in sentence] == [], sentence


def test_a_folder_that_is_no_run_is_refused_by_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", "empty"]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_wrong_settings_are_answered_before_the_heavy_imports() -> None:
    """Seconds of imports, or Ray, would make every typing error expensive."""
    code = (
        "import sys; from asyncrlhf.cli.main import main\n"
        "import contextlib, io\n"
        "codes = [main(['train', 'stpes=1']), main(['train', '-m', 'seed=a,b']), main(['evaluate', 'stpes=1'])]\n"
        "codes += [main(['train', 'model.path=./nowhere']), main(['train', 'task=prompts', 'task.path=no.jsonl'])]\n"
        "codes += [main(['train', 'reward.kind=python', 'reward.target=nobody_has_this:f'])]\n"
        "shown = [['train'], ['sft'], ['doctor'], ['bench'], ['bench', 'weights'], ['schema'], ['sweep'], ['report']]\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    codes += [main([*words, '--help']) for words in shown]\n"
        "heavy = [m for m in ('torch', 'transformers', 'ray', 'wandb', 'matplotlib') if m in sys.modules]\n"
        "print(codes, heavy)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == f"{[2] * 6 + [0] * 8} []\n", done.stderr


def test_usage_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["--help"]) == 0 and main(["evaluate", "--help"]) == 0
    assert "asyncrlhf evaluate run=RUN" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "algorithm=a3po | aipo" in text and "async.max_staleness=null  (a whole number >= 0 or null)" in text
    assert main(["train", "--help", "generator.vllm"]) == 0
    text = capsys.readouterr().out
    assert "generator.vllm.dtype=auto" in text and "generator.slots" not in text and "async." not in text
    assert main(["train", "--help", "kv cache"]) == 0
    assert "fusion.cache_tokens" in capsys.readouterr().out
    assert main(["train", "--help", "max_stalenness"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_cfg_job_shows_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--cfg", "job", "algorithm=rloo", "async.max_staleness=7"]) == 0
    text = capsys.readouterr().out
    assert "max_staleness: 7" in text and "advantage: loo" in text


def test_jobs_are_those_of_hydras_own_sweeper() -> None:
    """Compared with the plain product of the written choices, the last one varying fastest."""
    jobs = sweep_jobs(["seed=range(0,3)", "async.mode=sync,async", "task.operations=[+,-]", "model.path='a,b'"])
    expected = [
        [f"seed={seed}", f"async.mode={mode}", "task.operations=[+,-]", "model.path='a,b'"]
        for seed, mode in itertools.product(range(3), ("sync", "async"))
    ]
    assert jobs == expected


def test_groups_of_a_users_folder(tmp_path: Path) -> None:
    """Their own algorithm and experiment; the experiment overrides groups of ours and of theirs."""
    conf = tmp_path / "my conf"
    (conf / "algorithm").mkdir(parents=True)
    (conf / "experiment").mkdir()
    (conf / "algorithm" / "mine.yaml").write_text("name: mine\nadvantage: raw\nepsilon: 0.3\n")
    (conf / "experiment" / "fast.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algorithm: mine\n  - override /async: one_step\nsteps: 3\n"
    )
    (conf / "experiment" / "ours.yaml").write_text("# @package _global_\ndefaults:\n  - override /algorithm: rloo\n")
    given = f"--config-dir={conf}"
    config = load_config([given, "algorithm=mine"])
    assert (config.algorithm.name, config.algorithm.epsilon) == ("mine", 0.3)
    config = load_config([given, "experiment=fast", "steps=4"])
    assert (config.algorithm.name, config.async_.mode, config.steps) == ("mine", "one_step", 4)
    config = load_config(["--config-dir", str(conf), "experiment=ours"])
    assert (config.algorithm.advantage, config.algorithm.correction) == ("loo", "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epsilonn: 0.3\n", ["algorithm.epsilonn is not a setting", "did you mean algorithm.epsilon?"]),
        ("epsilon: wide\n", ["algorithm.epsilon=wide", "allowed: a number."]),
        ("epsilon: -1\n", ["algorithm.epsilon=-1"]),
        ("epsilon: [\n", ["mine.yaml"]),
    ],
)
def test_faults_in_a_users_file(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "algorithm").mkdir(parents=True)
    (tmp_path / "conf" / "algorithm" / "mine.yaml").write_text(text)
    assert main(["train", "--config-dir=conf", "algorithm=mine"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and [word for word in words if word not in err] == [], err


def test_ranges_have_no_holes() -> None:
    for value in (0.0, 0.5):
        check_range("key", value, low=0, high=1, exclusive_high=True)
    for value, words in [(1.0, "< 1"), (-0.1, ">= 0"), (float("nan"), ">= 0"), (float("inf"), "< 1")]:
        with pytest.raises(ConfigError, match=words):
            check_range("key", value, low=0, high=1, exclusive_high=True)
    with pytest.raises(ConfigError, match="finite"):
        check_range("key", float("-inf"))


@pytest.mark.parametrize(
    ("sampling", "algorithm", "message"),
    [
        ({"repetition_penalty": 1.1}, {"correction": "none"}, "repetition_penalty=1.1 samples from another"),
        ({"generation_kwargs": {"frequency_penalty": 0.1}}, {"correction": "none"}, "frequency_penalty=0.1 samples"),
        ({"generation_kwargs": {"min_tokens": 3}}, {}, "min_tokens may exclude tokens without"),
        ({"repetition_penalty": 1.1}, {"correction": "mask"}, ""),
        ({"repetition_penalty": 1.1}, {"correction": "none", "anchor": "mu"}, ""),
    ],
)  # fmt: skip
def test_a_penalty_trains_under_an_algorithm_that_weighs_it(
    sampling: dict[str, Any], algorithm: dict[str, Any], message: str
) -> None:
    generator = GeneratorConfig(engine="vllm", **sampling)
    config = RunConfig(generator=generator, algorithm=AlgorithmConfig(**algorithm))
    if not message:
        check_penalties(config)
        return
    with pytest.raises(ConfigError, match=message):
        check_penalties(config)


def test_what_from_pretrained_takes_from_settings_is_not_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"model.model_init_kwargs.dtype has its own setting"):
        load_config(["model.model_init_kwargs={dtype:float32}"])


def test_a_tilde_in_run_dir_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise libraries that write the records would expand it, and the run's other files would lie elsewhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(["run_dir='~/a/run'"]).run_dir == str(tmp_path / "a" / "run")


def booleans(part: Any, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(type(part))
    for declared in fields(part):
        name, value = f"{prefix}{declared.name.removesuffix('_')}", getattr(part, declared.name)
        if is_dataclass(value):
            yield from booleans(value, f"{name}.")
        elif hints[declared.name] in (bool, bool | None):
            yield name


@pytest.mark.in_turn
@pytest.mark.more
def test_no_true_or_false_setting_takes_a_number_besides_0_and_1() -> None:
    names = list(booleans(RunConfig()))
    assert len(names) > 20
    for name in names:
        with pytest.raises(ConfigError, match=f"{name}=3 is of the wrong kind; allowed: true or false."):
            load_config([f"{name}=3"])
    assert load_config(["checkpoint.at_end=0"]).checkpoint.at_end is False
    assert load_config(["checkpoint.at_end=1"]).checkpoint.at_end is True


def test_a_run_is_named_by_its_task_if_by_nothing_else() -> None:
    """A user's own prompts do not land among the runs of sums."""
    assert load_config([]).name == RunConfig().name == "arithmetic"
    assert load_config(["task=reasoning_gym"]).name == "reasoning_gym"
    assert load_config(["task=prompts", "task.path=rows.jsonl"]).name == "prompts"
    assert load_config(["task=prompts", "task.path=rows.jsonl", "name=mine"]).name == "mine"
    assert load_config(["experiment=vllm_cpu"]).name == "vllm_cpu"
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder())):
        jobs = compose("config", overrides=["task=reasoning_gym"], return_hydra_config=True)
        assert jobs.hydra.sweep.dir.startswith("runs/reasoning_gym/")
