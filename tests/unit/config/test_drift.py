"""Settings that differ from a checkpoint's: each has a decision, and all are named in one message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.drift import RULES, Change, drift, rule, shown, told
from asyncrlhf.config.inputs import SAMPLE_BYTES, SAMPLES, digests
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.settings_list import every_setting
from asyncrlhf.config.source_files import source_files
from asyncrlhf.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
ROWS = '{"prompt": "1+1=", "answer": "2"}\n' * 40


def changes(before: Sequence[str], now: Sequence[str], **more: object) -> dict[str, Change]:
    """By key; the settings before have been through a checkpoint's JSON."""
    saved = json.loads(json.dumps(to_plain(load_config(list(before)))))
    return {change.key: change for change in drift(saved, load_config(list(now)), **more)}  # type: ignore[arg-type]


def test_every_setting_has_a_decision_and_every_rule_a_setting() -> None:
    keys = [setting.key for setting in every_setting()]
    assert len(keys) > 250
    assert {rule(key)[0] for key in keys} == {"refuse", "adapt", "note"}
    idle = [name for name in RULES if not any(f"{key}.".startswith(f"{name}.") for key in keys)]
    assert idle == []


def test_the_documentation_shows_every_rule() -> None:
    page = (ROOT / "docs" / "resume.md").read_text()
    assert [n for n, (decision, reason) in RULES.items() if f"| `{n}` | {decision} | {reason} |" not in page] == []


@pytest.mark.parametrize(
    ("before", "now", "key", "decision"),
    [
        ((), ("seed=1",), "seed", "refuse"),
        ((), ("batch_size=256",), "batch_size", "refuse"),
        ((), ("task.digits=3",), "task.digits", "refuse"),
        ((), ("task.heldout_size=4",), "task.heldout_size", "refuse"),
        ((), ("num_generations=2",), "num_generations", "refuse"),
        ((), ("model.dtype=bfloat16",), "model.dtype", "refuse"),
        ((), ("reward.missing_eos_penalty=1",), "reward.missing_eos_penalty", "refuse"),
        ((), ("buffer.max_reuse=2",), "buffer.max_reuse", "refuse"),
        ((), ("learner.optim=muon",), "learner.optim", "refuse"),
        ((), ("generator.top_k=5",), "generator.top_k", "refuse"),
        ((), ("model.lora.r=4",), "model.lora.r", "refuse"),
        ((), ("reward.kind=python", "reward.target=a:b"), "reward.target", "refuse"),
        ((), ("algorithm=ppo",), "algorithm.advantage", "refuse"),
        ((), ("algorithm=impact",), "algorithm.anchor", "refuse"),
        ((), ("algorithm=grpo",), "algorithm.name", "adapt"),
        (("algorithm=ppo",), ("algorithm=vtrace",), "algorithm.advantage", "adapt"),
        ((), ("learner.mixed_precision=float16",), "learner.mixed_precision", "refuse"),
        ((), ("learner.mixed_precision=bfloat16",), "learner.mixed_precision", "adapt"),
        ((), ("learner.ranks=2",), "learner.ranks", "adapt"),
        (("learner=deepspeed",), ("learner=deepspeed", "learner.ranks=4"), "learner.ranks", "refuse"),
        ((), ("learner.sharding=fsdp2",), "learner.sharding", "refuse"),
        ((), ("learner.ranks=2", "learner.tensor_parallel_size=2"), "learner.tensor_parallel_size", "refuse"),
        (
            ("learner.ranks=2", "learner.tensor_parallel_size=2"),
            ("learner.ranks=2", "learner.sharding=fsdp2"),
            "learner.sharding",
            "adapt",
        ),
        ((), ("learner.learning_rate=1e-3",), "learner.learning_rate", "adapt"),
        ((), ("async.max_staleness=1",), "async.max_staleness", "adapt"),
        ((), ("async.mode=sync",), "async.mode", "refuse"),
        ((), ("generator=vllm",), "generator.engine", "adapt"),
        ((), ("logging.wandb=disabled",), "logging.wandb", "note"),
        ((), ("reward.workers=2",), "reward.workers", "note"),
        ((), ("weights.transport=disk",), "weights.transport", "note"),
        (
            ("task.datasets=[a]", "++task.dataset_options.a.b=1"),
            ("task.datasets=[a]", "++task.dataset_options.a.b=2"),
            "task.dataset_options.a.b",
            "refuse",
        ),
    ],
)
@pytest.mark.more_but(every=4)
def test_a_changed_setting_is_decided(before: tuple[str, ...], now: tuple[str, ...], key: str, decision: str) -> None:
    assert changes(before, now)[key].decision == decision


def test_nothing_changed_is_nothing_said() -> None:
    assert changes(["async.max_staleness=4"], ["async.max_staleness=4", "run_dir=x", "checkpoint.resume=auto"]) == {}
    assert told([], "x") == ""


def test_a_setting_that_the_checkpoint_does_not_know_is_at_its_default() -> None:
    saved = to_plain(RunConfig())
    del saved["learner"]["optim"], saved["fusion"]
    assert drift(saved, RunConfig()) == []


def test_steps_that_are_done_stay_done() -> None:
    assert changes([], ["steps=10"], step=10)["steps"].decision == "adapt"
    fewer = changes([], ["steps=9"], step=10)["steps"]
    assert fewer.decision == "refuse" and str(fewer) == "steps=9 (was 500): 10 steps are done"


def test_one_message_names_all() -> None:
    found = changes([], ["seed=1", "batch_size=256", "learner.learning_rate=1e-3", "logging.progress=none"])
    with pytest.raises(ConfigError) as refused:
        told(list(found.values()), "run/checkpoints/step-00000003")
    said = str(refused.value)
    assert "\n" not in said and "refused: seed=1 (was 0): " in said and "batch_size=256 (was 128): " in said
    assert "adopted: learner.learning_rate=0.001 (was 5e-05)" in said and "noted: logging.progress=none" in said
    kept = [change for change in found.values() if change.decision != "refuse"]
    assert told(kept, "x").startswith("Settings that differ from the checkpoint's: adopted: ")


def test_values_are_short_and_without_credentials() -> None:
    assert shown("http://user:secret@host/score") == "http://***@host/score"
    assert len(shown("x" * 500)) == 60


def test_content_counts_and_not_its_place(tmp_path: Path) -> None:
    def config(name: str) -> RunConfig:
        return load_config(["task=prompts", f"task.path={tmp_path / name}"])

    for name in ("one.jsonl", "moved.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(ROWS if name != "other.jsonl" else ROWS.replace("2", "3", 1))
    first = config("one.jsonl")
    held = digests(first)
    assert {"model.path", "task.path"} <= held.keys()

    def drifted(name: str) -> list[Change]:
        return drift(to_plain(first), config(name), held=held, found=digests(config(name)))

    assert drifted("one.jsonl") == []
    assert [(c.key, c.decision) for c in drifted("moved.jsonl")] == [("task.path", "note")]
    assert [(c.key, c.decision) for c in drifted("other.jsonl")] == [("task.path", "refuse")]
    (tmp_path / "one.jsonl").write_text(ROWS + ROWS)
    assert [(c.key, c.decision) for c in drifted("one.jsonl")] == [("content of task.path", "refuse")]


def test_of_a_large_file_samples_are_read(tmp_path: Path) -> None:
    file = tmp_path / "large.jsonl"
    with file.open("wb") as opened:
        opened.truncate(2 * SAMPLES * SAMPLE_BYTES)
    config = load_config(["task=prompts", f"task.path={file}"])
    before = digests(config)["task.path"]
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"x")
    assert digests(config)["task.path"] != before


def test_code_is_compared_with_the_modules_beside_it_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    for folder in (tmp_path / "drift_parts", installed):
        folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(installed)
    files = {
        "drift_reward.py": "import json, numpy, drift_installed\nfrom drift_parts.used import ONE\ndef f(): ...\n",
        "drift_parts/__init__.py": "",
        "drift_parts/used.py": "from . import deeper\nONE = 1\n",
        "drift_parts/deeper.py": "import drift_reward  # a circle\n",
        "drift_parts/unused.py": "",
        ".venv/lib/site-packages/drift_installed.py": "import drift_neighbour\n",
        ".venv/lib/site-packages/drift_neighbour.py": "",
        "drift_optim.py": "class Mine: ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    config = load_config(["reward.kind=python", "reward.target=drift_reward:f", "learner.optim=drift_optim:Mine"])
    held = digests(config)
    changed = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "# more\n")
        found = digests(config)
        changed[name] = {key for key in found if found[key] != held[key]}
        held = found
    noticed = {"drift_reward.py", "drift_parts/__init__.py", "drift_parts/used.py", "drift_parts/deeper.py"}
    assert {name for name, keys in changed.items() if keys == {"reward.target"}} == noticed
    assert changed["drift_optim.py"] == {"learner.optim"}
    assert changed["drift_parts/unused.py"] == changed[".venv/lib/site-packages/drift_installed.py"] == set()
    assert source_files("drift_installed") == [installed / "drift_installed.py"]
    (change,) = drift(to_plain(config), config, held={"reward.target": "before"}, found=held)
    assert change.decision == "note"


def test_a_setting_that_no_longer_exists_is_named_and_decided_by_its_group() -> None:
    before = to_plain(load_config([]))
    before["logging"]["wandb_notes"], before["reward"]["on_failure"] = "x", "stop"
    found = {change.key: change for change in drift(before, load_config([]))}
    assert (found["logging.wandb_notes"].decision, found["reward.on_failure"].decision) == ("note", "refuse")
    assert str(found["reward.on_failure"]) == "reward.on_failure=nothing (was stop): is no setting of this version"
