"""Every kind of damage to a checkpoint or to the records that it counts on ends in one sentence or a fallback."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrlhf.cli.main import main
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.checkpoint_manifest import MANIFEST, Seals, check_manifest, seal
from asyncrlhf.errors import CheckpointError, ConfigError
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.orchestrator.run import Prepared, prepare
from asyncrlhf.records.write import record_marker
from asyncrlhf.records.write.checkpoint import FOLDER, list_checkpoints, read_checkpoint, sweep_unfinished
from tests.loop import FAKE, QUIET, run
from tests.unit.learner.ranks import build

SETTINGS = (
    *FAKE,
    "model.path=tiny",
    "async.mode=async",
    "async.max_staleness=2",
    "eval_every=0",
    "checkpoint.every=2",
    "checkpoint.keep=2",
)
WEIGHTS, TRAINER = "learner/model/model.safetensors", "learner/trainer.safetensors"
STATE, ROLLOUTS, RANDOM = "controller.json", "rollouts.arrow", "learner/rank-0.safetensors"
Damage = Callable[[Path], object]  # is given the newest checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints, the first with rollouts in the buffer."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    run(folder, *SETTINGS, "steps=4")
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002", "step-00000004"]
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@cache
def config() -> RunConfig:
    """Composed once: that takes longer than all else here."""
    return load_config([*QUIET, *SETTINGS, "runtime=local", "steps=9"])


def resumed(folder: Path, resume: str = "auto") -> Prepared:
    checkpoint = replace(config().checkpoint, resume=resume)
    return prepare(replace(config(), run_dir=str(folder), checkpoint=checkpoint))


def truncated(name: str, to: float = 0.5) -> Damage:
    return lambda at: os.truncate(at / name, int((at / name).stat().st_size * to))


def flipped(name: str) -> Damage:
    """One bit in the middle."""

    def flip(at: Path) -> None:
        content = bytearray((at / name).read_bytes())
        content[len(content) // 2] ^= 1
        (at / name).write_bytes(content)

    return flip


def removed(name: str) -> Damage:
    return lambda at: (at / name).unlink()


def replaced(name: str, content: bytes) -> Damage:
    return lambda at: (at / name).write_bytes(content)


def swapped(name: str) -> Damage:
    """The file of the checkpoint before."""
    return lambda at: shutil.copy(list_checkpoints(at.parents[1])[-2] / name, at / name)


def linked(name: str, to: str) -> Damage:
    def link(at: Path) -> None:
        (at / name).unlink()
        (at / name).symlink_to(to)

    return link


def folder_instead(name: str) -> Damage:
    def make(at: Path) -> None:
        (at / name).unlink()
        (at / name).mkdir()

    return make


def pipe_instead(name: str) -> Damage:
    def make(at: Path) -> None:
        (at / name).unlink()
        os.mkfifo(at / name)

    return make


def resealed(at: Path) -> None:
    """What somebody does who can compute a hash: the manifest fits again."""
    files = [path for path in at.rglob("*") if path.is_file() and path.name != MANIFEST]
    (at / MANIFEST).write_text(json.dumps({"files": seal(at, files)}))


def hostile(damage: Damage) -> Damage:
    def act(at: Path) -> None:
        damage(at)
        resealed(at)

    return act


def state_with(**values: Any) -> Damage:
    """``controller.json`` with other values, in a manifest that fits; ``...`` takes one away."""

    def change(at: Path) -> None:
        document = json.loads((at / STATE).read_text()) | values
        (at / STATE).write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))

    return hostile(change)


def manifest_with(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def rewrite(at: Path) -> None:
        document = json.loads((at / MANIFEST).read_text())
        changed = change(document["files"])
        (at / MANIFEST).write_text(json.dumps(document if changed is None else changed))

    return rewrite


def head_with(change: Callable[[str], str]) -> Damage:
    """The trainer's file with another header, in a manifest that fits."""

    def rewrite(at: Path) -> None:
        content = (at / TRAINER).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = change(content[8 : 8 + size].decode()).encode()
        (at / TRAINER).write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])

    return hostile(rewrite)


def record(name: str, damage: Damage) -> Damage:
    """Damage to a file of the run, which the newest checkpoint counts on."""
    return lambda at: damage(at.parents[1] / name)


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    return lambda path: path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def last_part(at: Path, folder: str) -> Path:
    """The last that the checkpoint counts on."""
    parts = json.loads((at / STATE).read_text())["marker"][{"rollouts": "parts", "spans": "span_parts"}[folder]]
    return at.parents[1] / folder / f"part-{parts - 1:05d}.parquet"


def journal(change: Callable[[list[bytes], int], list[bytes]]) -> Damage:
    """Damage to ``journal.jsonl``, given its lines and how many of them the checkpoint before counts on."""

    def damage(at: Path) -> None:
        before = json.loads((list_checkpoints(at.parents[1])[-2] / STATE).read_text())["marker"]["journal"]
        lines(lambda all_lines: change(all_lines, before))(at.parents[1] / "journal.jsonl")

    return damage


def tokens_part(damage: Damage) -> Damage:
    """Damage to the last part of ``rollout_tokens/``."""
    return lambda at: damage(max((at.parents[1] / "rollout_tokens").iterdir()))


def scribbled(path: Path) -> None:
    """Other bytes in the middle, behind which the footer stays as it was; a second call undoes it."""
    content = path.read_bytes()
    middle = len(content) // 3
    path.write_bytes(content[:middle] + bytes(byte ^ 0x55 for byte in content[middle : middle + 400])
                     + content[middle + 400 :])  # fmt: skip


NESTED = b'{"a":' * 200_000
DAMAGES: dict[str, Damage] = {
    **{f"{name} {how.__name__}": how(name)
       for how in (truncated, flipped, removed, folder_instead)
       for name in (STATE, ROLLOUTS, WEIGHTS, TRAINER, RANDOM, MANIFEST)},
    "weights of length 0": truncated(WEIGHTS, 0.0),
    "manifest of length 0": truncated(MANIFEST, 0.0),
    "an extra file": replaced("learner/model/adapter_config.json", b"{}"),
    "a file longer than it was": lambda at: (at / ROLLOUTS).open("ab").write(b"more"),
    "weights of the checkpoint before": swapped(WEIGHTS),
    "trainer of the checkpoint before": swapped(TRAINER),
    "manifest of the checkpoint before": swapped(MANIFEST),
    "a link out of the folder": linked(WEIGHTS, "/dev/zero"),
    "a link in a circle": linked(STATE, "controller.json"),
    "a linked folder": lambda at: (at / "learner/model").rename(at.parent / ".m") and
        (at / "learner/model").symlink_to(at.parent / ".m"),
    "a pipe, which would be read for ever": pipe_instead(ROLLOUTS),
    "manifest: a list": replaced(MANIFEST, b"[]"),
    "manifest: files no object": manifest_with(lambda files: {"files": 3}),
    "manifest: facts no object": manifest_with(lambda files: files.update({STATE: 7})),
    "manifest: a path out of the folder": manifest_with(lambda files: files.update({"../../x": files[STATE]})),
    "manifest: an absolute path": manifest_with(lambda files: files.update({"/etc/passwd": files[STATE]})),
    "manifest: a huge size": manifest_with(lambda files: files[WEIGHTS].update(bytes=2**62)),
    "manifest: a negative size": manifest_with(lambda files: files[WEIGHTS].update(bytes=-1)),
    "manifest: no hash": manifest_with(lambda files: files[WEIGHTS].pop("sha256") and None),
    "manifest: not UTF-8": replaced(MANIFEST, b'{"files": "\xff\xfe"}'),
    "manifest: nested without end": replaced(MANIFEST, NESTED),
    # From here on the hashes fit: whoever wrote this can compute one.
    "state: no JSON": hostile(replaced(STATE, b"{")),
    "state: not UTF-8": hostile(replaced(STATE, b'{"version": "\xff"}')),
    "state: a list": hostile(replaced(STATE, b"[1, 2]")),
    "state: nested without end": hostile(replaced(STATE, NESTED)),
    "state: an older format": state_with(format=3),
    "state: no format": state_with(format=...),
    "state: a negative version": state_with(version=-1),
    "state: the version is NaN": state_with(version=float("nan")),
    "state: the version is a text": state_with(version="4"),
    "state: another version than the learner's": state_with(version=3),
    "state: no ledger": state_with(ledger=...),
    "state: the ledger is a list": state_with(ledger=[]),
    "state: a ledger that does not add up": lambda at: state_with(
        ledger=json.loads((at / STATE).read_text())["ledger"] | {"trained": 10**6})(at),
    "state: a buffer of numbers": state_with(buffer=7),
    "state: groups that nobody admitted": state_with(groups=[{"group_id": 1, "unscored": [10**9], "scored": {}}]),
    "state: a cursor of nothing": state_with(cursor=None),
    "state: no marker": state_with(marker=...),
    "state: a marker of texts": state_with(marker={"metrics_lines": "4"}),
    "state: a negative marker": state_with(marker={"metrics_lines": -6, "parts": 0, "span_parts": 0}),
    "state: a marker of unknown counts": state_with(marker={"lines": 6}),
    "state: no seals": lambda at: state_with(
        marker=json.loads((at / STATE).read_text())["marker"] | {"seals": {}})(at),
    "state: seals of nothing": lambda at: state_with(
        marker=json.loads((at / STATE).read_text())["marker"] | {"seals": 7})(at),
    "state: a seal of a file out of the folder": lambda at: state_with(
        marker=json.loads((at / STATE).read_text())["marker"] | {"seals": {"../x": {"bytes": 1, "sha256": ""}}})(at),
    "state: a seal of a text": lambda at: state_with(
        marker=json.loads((at / STATE).read_text())["marker"] | {"seals": {"rollouts/part-00000.parquet": "x"}})(at),
    "state: uses of nothing": state_with(uses={"a": 1}),
    "rollouts: none of the buffer's": hostile(swapped(ROLLOUTS)),
    "rollouts: a pickle": hostile(replaced(ROLLOUTS, pickle.dumps({}))),
    "rollouts: an empty file": hostile(replaced(ROLLOUTS, b"")),
    "trainer: a pickle": hostile(lambda at: torch.save({"version": 6}, at / TRAINER)),
    "trainer: of the checkpoint before": hostile(swapped(TRAINER)),
    "trainer: missing": hostile(removed(TRAINER)),
    "trainer: a header of 2**60 bytes": hostile(replaced(TRAINER, struct.pack("<Q", 2**60) + b"{}")),
    "trainer: no state in the header": head_with(lambda text: text.replace('"state"', '"steta"')),
    "trainer: shapes that the bytes do not fill": head_with(lambda text: text.replace('"shape": [', '"shape": [9, ')),
    "model: missing": hostile(lambda at: shutil.rmtree(at / "learner/model")),
    # Records that the checkpoint counts on.
    "metrics.jsonl missing": record("metrics.jsonl", Path.unlink),
    "metrics.jsonl torn": record("metrics.jsonl", lambda path: os.truncate(path, path.stat().st_size - 5)),
    "metrics.jsonl with fewer lines": record("metrics.jsonl", lines(lambda all_lines: all_lines[:-1])),
    "metrics.jsonl with a changed number": record("metrics.jsonl", lines(
        lambda all_lines: [*all_lines[:-1], all_lines[-1].replace(b'"loss": ', b'"loss": 1')])),
    "metrics.jsonl with a changed first line": record("metrics.jsonl", lines(
        lambda all_lines: [all_lines[0].replace(b'"loss": ', b'"loss": 1'), *all_lines[1:]])),
    "metrics.jsonl a folder": record("", folder_instead("metrics.jsonl")),
    "a part of the rollouts missing": lambda at: last_part(at, "rollouts").unlink(),
    "a part of the rollouts torn": lambda at: os.truncate(last_part(at, "rollouts"), 900),
    "a part of the spans torn": lambda at: os.truncate(last_part(at, "spans"), 900),
    "a part of the rollouts changed inside": lambda at: scribbled(last_part(at, "rollouts")),
    "a part of the spans changed inside": lambda at: scribbled(last_part(at, "spans")),
    "a part of the tokens torn": tokens_part(lambda path: os.truncate(path, 5)),
    "a part of the tokens changed inside": tokens_part(scribbled),
    "a part of the tokens missing": tokens_part(Path.unlink),
    "journal.jsonl missing": record("journal.jsonl", Path.unlink),
    "journal.jsonl emptied": record("journal.jsonl", lambda path: os.truncate(path, 0)),
    "journal.jsonl a folder": record("", folder_instead("journal.jsonl")),
    "journal.jsonl a pipe": record("", pipe_instead("journal.jsonl")),
    "journal.jsonl nothing but bytes": record("journal.jsonl", lambda path: path.write_bytes(b"\xff\xfe" * 9000)),
    "journal.jsonl shorter": journal(lambda all_lines, before: all_lines[: before + 1]),
    "journal.jsonl torn": journal(lambda all_lines, before: [*all_lines[:before], all_lines[before][:9]]),
    "journal.jsonl with a line of something else": journal(
        lambda all_lines, before: [*all_lines[: before + 1], b"x\xff\n", *all_lines[before + 2 :]]),
    "journal.jsonl without a line": journal(lambda all_lines, before: all_lines[:before] + all_lines[before + 1 :]),
    "journal.jsonl with a changed first line": journal(
        lambda all_lines, before: [all_lines[0].replace(b"begin", b"began"), *all_lines[1:]]),
    "journal.jsonl without its tenth line": journal(lambda all_lines, before: all_lines[:9] + all_lines[10:]),
}  # fmt: skip


# Nothing that any of the checkpoints counts on is left.
REFUSED = (
    *("metrics.jsonl missing", "metrics.jsonl a folder", "journal.jsonl missing", "journal.jsonl emptied"),
    *("journal.jsonl a folder", "journal.jsonl a pipe", "journal.jsonl nothing but bytes"),
    *("metrics.jsonl with a changed first line", "journal.jsonl with a changed first line"),
    "journal.jsonl without its tenth line",
)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.more_but(every=5)
def test_damage_leads_back_to_the_checkpoint_before_and_says_so(copied: Path, kind: str) -> None:
    newest = list_checkpoints(copied)[-1]
    DAMAGES[kind](newest)
    if kind not in REFUSED:
        prepared = resumed(copied)
        assert prepared.saved is not None and prepared.saved.step == 2, kind
        (note, *_) = prepared.notes
        assert note.startswith("Passed over ") and note.endswith(". The run resumes from step-00000002."), note
        assert "\n" not in note and len(note) < 600, note
    for resume in (str(newest), *(("auto",) if kind in REFUSED else ())):
        with pytest.raises(ConfigError) as refusal:
            resumed(copied, resume)
        said = str(refusal.value)
        assert "\n" not in said and str(copied) in said and len(said) < 600, said


def test_a_damaged_run_without_a_whole_checkpoint_is_refused_and_not_begun_anew(copied: Path) -> None:
    for checkpoint in list_checkpoints(copied):
        flipped(WEIGHTS)(checkpoint)
    with pytest.raises(ConfigError, match=r"no whole checkpoint: the checkpoint .*step-00000004 is damaged"):
        resumed(copied)


def test_a_run_that_went_back_from_a_damaged_journal_holds(copied: Path) -> None:
    DAMAGES["journal.jsonl without a line"](list_checkpoints(copied)[-1])
    run(copied, *SETTINGS, "steps=4", "checkpoint.resume=auto")  # verifies its records
    assert [path.name for path in list_checkpoints(copied)] == ["step-00000002", "step-00000004"]
    assert resumed(copied).saved is not None


def test_what_is_damaged_before_any_actor_starts_gives_one_sentence_and_exit_code_2(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "journal.jsonl").unlink()
    (copied / "config.yaml").write_text("kept: true\n")
    settings = ("runtime=local", f"run_dir={copied}", "steps=9", "checkpoint.resume=auto")
    assert main(["train", *QUIET, *SETTINGS, *settings]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "journal.jsonl, which the checkpoint counts on, cannot be read" in said
    assert (copied / "config.yaml").read_text() == "kept: true\n", "the run directory was opened"


def test_each_part_is_hashed_once(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, hashed = read_checkpoint(list_checkpoints(copied)[-1]).marker.seals, list[str]()

    def watched(folder: Path, files: Iterable[Path]) -> Seals:
        names = list(files)
        hashed.extend(path.relative_to(folder).as_posix() for path in names)
        return seal(folder, names)

    monkeypatch.setattr(record_marker, "seal", watched)
    run(copied, *SETTINGS, "steps=8", "checkpoint.resume=auto")
    assert len(hashed) == len(set(hashed)) and not before.keys() & set(hashed)
    for folder in ("rollouts", "spans", "rollout_tokens"):
        assert sum(name.startswith(f"{folder}/") for name in hashed) >= 2, folder


def test_a_broken_config_of_the_run_before_decides_nothing(copied: Path) -> None:
    (copied / "config.yaml").write_bytes(b"\xff{[")
    prepared = resumed(copied)
    assert prepared.saved is not None and prepared.saved.step == 4


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_no_file_of_a_checkpoint_is_code(copied: Path, tmp_path: Path) -> None:
    """A pickle under every name that there is, or was, or that a library might look for, in a manifest that fits; read
    by what reads a checkpoint before the run, and by the learner after it."""
    at, exploded = list_checkpoints(copied)[-1], tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    with pytest.raises(FileExistsError):  # it works
        pickle.loads(bomb), pickle.loads(bomb)
    exploded.rmdir()
    loaded = (STATE, ROLLOUTS, WEIGHTS, TRAINER, RANDOM)
    asked = ("pytorch_model.bin", "adapter_model.bin", "adapter_config.json", "config.json", "modeling_llama.py")
    legacy = ("rollouts.pkl", "learner/trainer.pt", "learner/rank-0.pt", "learner/fsdp2/.metadata")
    learner, weights = build(), (at / WEIGHTS).read_bytes()
    for name in (*loaded, *legacy, *(f"learner/model/{name}" for name in asked)):
        before = (at / name).read_bytes() if (at / name).exists() else None
        (at / name).parent.mkdir(exist_ok=True)
        (at / name).write_bytes(zipped(bomb) if name.endswith((".pt", ".bin", ".safetensors")) else bomb)
        if name.endswith("pytorch_model.bin"):
            (at / WEIGHTS).unlink()
        resealed(at)
        refused = [is_refused(read_checkpoint, at), is_refused(learner.load, at / "learner")]
        assert not exploded.exists(), f"{name} was executed"
        assert any(refused) or name not in loaded
        (at / name).unlink()
        if before is not None:
            (at / name).write_bytes(before)
        (at / WEIGHTS).write_bytes(weights)


def zipped(bomb: bytes) -> bytes:
    """As ``torch.save`` packs it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
        archive.writestr("archive/version", "3")
    return file.getvalue()


def is_refused(read: Callable[[Path], object], folder: Path) -> bool:
    """In one sentence; whatever else is raised is a failure."""
    try:
        read(folder)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return True
    return False


def test_a_learner_loads_no_weights_that_are_not_all_there(copied: Path) -> None:
    """Transformers would make up what is missing."""
    at = list_checkpoints(copied)[-1] / "learner"
    tensors = load_file(at / "model/model.safetensors")
    first = "model.norm.weight"
    save_file({k: v for k, v in tensors.items() if k != first}, at / "model/model.safetensors", {"format": "pt"})
    learner = build()
    with pytest.raises(CheckpointError, match=first):
        learner.load(at)
    save_file(tensors | {first: tensors[first][:-1].clone()}, at / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError):
        learner.load(at)


def test_a_learner_takes_no_optimizer_states_of_other_shapes(copied: Path) -> None:
    at = list_checkpoints(copied)[-1] / "learner"
    learner: TorchBackend = build()
    states = learner.updater.optimizers[0]
    learner.load(at)
    states.state[next(iter(states.state))]["exp_avg"] = torch.zeros(3)
    learner.save(at)
    with pytest.raises(CheckpointError, match=r"exp_avg is \(3,\), its parameter"):
        build().load(at)


def test_what_a_dead_process_left_is_swept_and_what_is_whole_stays(copied: Path) -> None:
    left = copied / FOLDER / ".step-00000008.tmp" / "learner"
    left.mkdir(parents=True)
    (left / "trainer.safetensors").write_bytes(b"half")
    before = list_checkpoints(copied)
    sweep_unfinished(copied)
    assert not left.parent.exists() and list_checkpoints(copied) == before
    for checkpoint in before:
        check_manifest(checkpoint)


def test_a_run_that_went_back_keeps_no_checkpoint_of_the_steps_it_does_again(copied: Path) -> None:
    """Their records are cut: nothing could go on from them, and they would count among the newest that are kept."""
    newest = list_checkpoints(copied)[-1]
    flipped(WEIGHTS)(newest)
    settings = ("steps=3", "checkpoint.resume=auto", "checkpoint.keep=1")
    done = run(copied, *SETTINGS, *settings)
    assert [path.name for path in list_checkpoints(copied)] == ["step-00000003"]
    assert [row["step"] for row in done.metrics] == [1, 2, 3]
    done.assert_ledger_whole()
