"""Old records become small with ``logging.keep_gib``: what is verified stays, what is only looked at goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from asyncrlhf.cli.main import main
from asyncrlhf.errors import CheckpointError
from asyncrlhf.records.read.verify import examine, verify
from asyncrlhf.records.write import thinning
from asyncrlhf.records.write.record_marker import RecordMarker, check_records
from asyncrlhf.records.write.recorder import RunRecorder
from asyncrlhf.records.write.rollout_rows import BULKY, RolloutRow, write_part
from tests.integration.test_local_loop import interrupt_after
from tests.integration.test_verify_episodes import honest as honest_episodes
from tests.loop import FAKE, Finished, run
from tests.unit.records.test_records import SMALL, row

RUN = (
    *FAKE, "generator.replicas=2", "async=fixed_lag", "async.lag=2", "steps=16", "checkpoint.every=3",
    "logging.flush_every=16", "checkpoint.resume=auto",
)  # fmt: skip
FOLDERS = ("rollouts", "rollout_tokens", "spans")
NOTHING = "logging.keep_gib=1e-9"
episodes = honest_episodes  # a fixture


def parts(run_dir: Path, folder: str = "rollouts") -> list[Path]:
    return sorted((run_dir / folder).glob("*.parquet"))


def is_thin(path: Path) -> bool:
    return thinning.THINNED_FROM in (pq.read_schema(path).metadata or {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("whole"), *RUN)


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same run with no room for old records, stopped twice on its way."""
    folder = tmp_path_factory.mktemp("thinned")
    interrupt_after(folder, 5, *RUN, NOTHING)
    interrupt_after(folder, 11, *RUN, NOTHING)
    return run(folder, *RUN, NOTHING)


def test_a_thinned_run_tells_the_same_except_texts_and_logprobs(whole: Finished, thinned: Finished) -> None:
    assert whole.untimed_metrics == thinned.untimed_metrics
    kept = [name for name in whole.rollouts.columns if name not in (*BULKY, "reward", "generator_id")]
    kept = [name for name in kept if not name.endswith("_at")]
    before, after = (of.trained[kept] for of in (whole, thinned))
    assert before.map(repr).equals(after.map(repr))
    old, newest = parts(thinned.folder)[:-4], parts(thinned.folder)[-1]
    assert old and all(is_thin(path) for path in old) and not is_thin(newest)
    texts = pd.concat([pd.read_parquet(path) for path in old])
    assert texts[list(BULKY)].isna().all(axis=None)
    assert pd.read_parquet(newest).behavior_logprobs.notna().all()
    for folder in FOLDERS[1:]:
        *emptied, last = parts(thinned.folder, folder)
        assert sum(pq.read_metadata(path).num_rows == 0 for path in emptied) >= len(emptied) - 3
        assert pq.read_metadata(last).num_rows > 0


def test_verify_proves_as_much_of_a_thinned_run(whole: Finished, thinned: Finished) -> None:
    found, other = examine(thinned.folder), examine(whole.folder)
    assert found.broken == []
    for what in ("rollouts", "tokens", "uses", "steps"):
        assert found.checked[what] == other.checked[what] or what in ("rollouts", "tokens")
    path = parts(thinned.folder)[0]
    rows = pq.read_table(path)
    held, metadata = path.read_bytes(), rows.schema.metadata
    older = rows.to_pylist()
    older[0]["policy_versions"] = [10**6] * len(older[0]["policy_versions"])
    pq.write_table(rows.from_pylist(older, rows.schema.with_metadata(metadata)), path)
    try:
        assert any("newer" in said for said in verify(thinned.folder)), "a lie in what is left is found as ever"
    finally:
        path.write_bytes(held)


def test_a_report_shows_what_is_left(thinned: Finished, tmp_path: Path) -> None:
    assert main(["report", str(thinned.folder), "--out", str(tmp_path / "page")]) == 0
    page = next(tmp_path.rglob("*.html")).read_text()
    assert '"recorded"' in page and "spans" in page


def test_observed_tokens_of_a_thinned_part_are_not_reported(episodes: Path) -> None:
    (path,) = parts(episodes)
    held = path.read_bytes()
    try:
        thinning.thin(path, "0" * 64)
        assert examine(episodes).broken == []
    finally:
        path.write_bytes(held)


TEXT = 100_000  # bytes of a response on disk, far more than what is kept of a part


def long(rollout_id: int) -> RolloutRow:
    return row(rollout_id, response=np.random.default_rng(rollout_id).bytes(TEXT).hex())


def recorded(folder: Path, keep: float | None, count: int = 4) -> tuple[RunRecorder, list[RecordMarker]]:
    """A recorder that has made checkpoints, each of a part of four long rollouts."""
    recorder, markers = RunRecorder(folder, {}, replace(SMALL, keep_gib=keep)), []
    for number in range(count):
        recorder.record([long(4 * number + i) for i in range(4)])
        markers.append(recorder.checkpoint())
    return recorder, markers


def test_no_more_is_thinned_than_the_limit_asks(tmp_path: Path) -> None:
    recorded(tmp_path / "whole", None, 1)[0].close()
    of_a_part = parts(tmp_path / "whole")[0].stat().st_size
    limit = 5.5 * of_a_part
    recorder, _ = recorded(tmp_path / "run", limit / 2**30, 12)
    recorder.close()
    found = parts(tmp_path / "run")
    assert [is_thin(path) for path in found] == [True] * 7 + [False] * 5
    assert 4.5 * of_a_part < sum(path.stat().st_size for path in found) <= limit


def test_a_rollout_keeps_some_seventy_bytes_however_long_its_answer(tmp_path: Path) -> None:
    """The figures of docs/records.md."""
    rng, count = np.random.default_rng(0), 128
    words = ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), rng.integers(2, 9))) for _ in range(5000)]
    often = 1 / np.arange(1, 5001)
    for length, a_token in ((1024, 7.6), (8192, 5.7)):
        rows = [
            row(
                i,
                response=" ".join(rng.choice(words, int(0.75 * length), p=often / often.sum())),
                policy_versions=np.sort(rng.integers(100, 103, length)),
                behavior_logprobs=np.log(rng.beta(3, 0.5, length)).astype(np.float32),
            )
            for i in range(count)
        ]
        path = tmp_path / "rollouts" / f"part-{length:05d}.parquet"
        path.parent.mkdir(exist_ok=True)
        write_part(path, rows)
        assert path.stat().st_size / count / length == pytest.approx(a_token, rel=0.1)
        thinning.thin(path, "0" * 64)
        assert path.stat().st_size / count < 120


def test_an_older_checkpoint_goes_on_after_a_newer_one_has_thinned(tmp_path: Path) -> None:
    recorder, markers = recorded(tmp_path, 1e-9)
    recorder.close()
    assert [is_thin(path) for path in parts(tmp_path)] == [True, True, True, False]
    for marker in markers:
        check_records(tmp_path, marker)
    again = RunRecorder(tmp_path, {}, SMALL, resume_from=markers[1])
    assert len(parts(tmp_path)) == 2
    again.record([long(i) for i in range(8, 12)])
    check_records(tmp_path, again.checkpoint())
    again.close()


def test_a_thin_part_is_known_by_what_it_says_and_not_by_its_size(tmp_path: Path) -> None:
    recorder, markers = recorded(tmp_path, 1e-9)
    recorder.close()
    first, seals = parts(tmp_path)[0], dict(markers[-1].seals)
    name = f"rollouts/{first.name}"
    seals[name] = {**seals[name], "bytes": first.stat().st_size}
    check_records(tmp_path, replace(markers[-1], seals=seals))
    seals[name] = {**seals[name], "sha256": "0" * 64}
    with pytest.raises(CheckpointError, match="has changed"):
        check_records(tmp_path, replace(markers[-1], seals=seals))


@pytest.mark.parametrize("what", ["changed", "of another part", "cut"])
def test_a_checkpoint_refuses_a_part_that_is_not_what_was_kept_of_its_own(tmp_path: Path, what: str) -> None:
    recorder, markers = recorded(tmp_path, None if what == "changed" else 1e-9)
    recorder.close()
    first, second, *_ = parts(tmp_path)
    if what == "changed":
        first.write_bytes(first.read_bytes() + b"x")
    elif what == "cut":
        first.write_bytes(first.read_bytes()[:-100])
    else:
        first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"part-00000.parquet, which the checkpoint counts on, has \d+ bytes"):
        check_records(tmp_path, markers[-1])


def test_a_part_number_that_a_rollback_gives_again_is_thinned_again(tmp_path: Path) -> None:
    recorder, markers = recorded(tmp_path, 1e-9)
    recorder.rewind(markers[0])
    for number in range(1, 4):
        recorder.record([long(100 + 4 * number + i) for i in range(4)])
        check_records(tmp_path, recorder.checkpoint())
    recorder.close()
    assert [is_thin(path) for path in parts(tmp_path)] == [True, True, True, False]


def test_a_disk_that_is_full_leaves_the_part_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = recorded(tmp_path, None)
    recorder.close()
    path = parts(tmp_path)[0]
    before = path.read_bytes()

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(thinning, "fsync", full)
    with pytest.raises(OSError, match="part-00000"):
        thinning.thin(path, "0" * 64)
    assert path.read_bytes() == before and not list(path.parent.glob("*.tmp"))
