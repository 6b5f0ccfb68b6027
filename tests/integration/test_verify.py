"""``asyncrlhf verify``: runs that kept their promises hold, and each lie in the records is found and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrlhf.cli.main import main
from asyncrlhf.cluster.local_runtime import LocalGenerator
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from asyncrlhf.records.read.verify import examine, verify
from asyncrlhf.records.write.rollout_rows import ROLLOUT_SCHEMA
from tests.loop import FAKE, run

EVENTFUL = (
    *FAKE,
    "batch_size=8",
    "generator.replicas=2",
    "async.max_staleness=2",
    "generator.slots=4",
    "generator.fake.tail_probability=0.1",
    "generator.fake.latency_max_ratio=50",
    "buffer.max_reuse=2",
    "learner.virtual_step_seconds=0.05",
    "generator.fake.failure_probability=0.08",
    "checkpoint.every=4",
    "checkpoint.resume=auto",
)
DEATHS = (2, 6, 9)  # versions at which a replica dies
KILLED = (1, 4, 7)  # ... and at which the files are kept as they are
Line = dict[str, Any]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with deaths, failures and reuse, which was killed and gone on with: its files are those of the moment."""
    base, retire = tmp_path_factory.mktemp("verify"), LearnLoop._drop_late

    def struck(self: LearnLoop) -> None:
        retire(self)
        if self.state.version in DEATHS:
            victim = self.runtime.generators[0]
            assert isinstance(victim, LocalGenerator)
            victim.kill("struck by the test")
        if self.state.version in KILLED:
            folder = base / f"killed-{self.state.version}"
            shutil.copytree(base / "run", folder, ignore=shutil.ignore_patterns("*.tmp", ".*"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LearnLoop, "_drop_late", struck)
        run(base / "run", *EVENTFUL, "steps=12")
    shutil.copytree(base / "killed-7", base / "resumed")
    with (base / "resumed" / "journal.jsonl").open("a") as file:
        file.write('{"n":99999,"event":"tr')  # torn by the kill
    run(base / "resumed", *EVENTFUL, "steps=12")
    return base / "resumed"


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


def test_a_killed_run_holds_and_says_what_is_in_flight(honest: Path) -> None:
    for version in KILLED:
        assert examine(honest.parent / f"killed-{version}").broken == []
    notes = examine(honest.parent / "killed-7").notes
    assert any("In flight when its records end" in note for note in notes)
    assert any("undone by a resume" in note for note in examine(honest).notes)


def test_an_eventful_run_holds(honest: Path) -> None:
    found = examine(honest)
    assert found.broken == []
    events = {json.loads(line)["event"] for line in (honest / "journal.jsonl").open()}
    expected = {"undone", "begin", "admitted", "started", "finished", "buffered", "trained", "failed", "requeued"}
    expected |= {"dropped", "step", "publish", "load", "loaded", "published", "died", "joined", "checkpoint", "end"}
    assert expected <= events, "the run was meant to have all that can be lied about"
    assert found.checked["steps"] == 12 and found.checked["attempts"] == 2
    assert found.checked["uses"] >= 12 * 7


def test_a_run_that_could_not_write_its_records_says_so_and_holds(copy: Path) -> None:
    """As one whose disk was full: rows of rollouts that ended are missing, and the summary knows it."""
    max((copy / "rollouts").glob("*.parquet")).unlink()
    assert any("have no row" in said for said in examine(copy).broken), "whole by its summary"
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"records_whole": False, "exit_reason": "failed: full"}))
    found = examine(copy)
    assert found.broken == []
    assert "The run could not write all of its records (failed: full)." in found.notes


# --- lies

Change = Callable[[Path], None]


def lines_of(folder: Path, name: str) -> list[Line]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def rewrite(folder: Path, name: str, lines: list[Line], renumber: bool = True) -> None:
    if renumber and name == "journal.jsonl":
        lines = [{**line, "n": number} for number, line in enumerate(lines)]
    (folder / name).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def in_journal(event: str, change: Callable[[Line], Line | list[Line] | None], **facts: Any) -> Change:
    """Put what ``change`` makes of it in the place of an event: the last with these facts."""

    def lie(folder: Path) -> None:
        lines = lines_of(folder, "journal.jsonl")
        wanted = {"event": event, **facts}
        at = [i for i, line in enumerate(lines) if all(line.get(key) == value for key, value in wanted.items())][-1]
        made = change(dict(lines[at]))
        lines[at : at + 1] = [] if made is None else made if isinstance(made, list) else [made]
        rewrite(folder, "journal.jsonl", lines)

    return lie


def in_metrics(change: Callable[[list[Line]], list[Line]]) -> Change:
    return lambda folder: rewrite(folder, "metrics.jsonl", change(lines_of(folder, "metrics.jsonl")))


def in_document(name: str, change: Callable[[Any], None]) -> Change:
    def lie(folder: Path) -> None:
        path = next(folder.glob(name))
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return lie


def in_rows(change: Callable[[list[Line], Line], list[Line] | None], wanted: Callable[[Line], bool]) -> Change:
    """``change`` gets the rows of the part that holds the last of the ``wanted`` ones, and that row."""

    def lie(folder: Path) -> None:
        for path in sorted(folder.glob("rollouts/*.parquet"), reverse=True):
            rows = pq.read_table(path).to_pylist()
            if found := [row for row in rows if wanted(row)]:
                made = change(rows, found[-1])
                pq.write_table(pa.Table.from_pylist(rows if made is None else made, ROLLOUT_SCHEMA), path)
                return
        raise LookupError("no such row")

    return lie


def trained(row: Line) -> bool:
    return row["state"] == "trained" and len(row["policy_versions"]) > 1 and min(row["policy_versions"]) > 2


def dropped(row: Line) -> bool:
    return bool(row["state"] == "dropped")


def put(**values: Any) -> Callable[[list[Line], Line], None]:
    return lambda rows, row: row.update(values)


def span_beyond_the_end(folder: Path) -> None:
    path = sorted(folder.glob("spans/*.parquet"))[-1]
    table = pq.read_table(path)
    late = pa.array([*table["end"].to_pylist()[:-1], 1e6])
    pq.write_table(table.set_column(table.schema.get_field_index("end"), "end", late), path)


def without_the_line(folder: Path) -> None:
    lines = lines_of(folder, "journal.jsonl")
    del lines[40]
    rewrite(folder, "journal.jsonl", lines, renumber=False)


def set_at(number: int, **values: Any) -> Callable[[list[Line]], list[Line]]:
    return lambda rows: [row | values if i == number else row for i, row in enumerate(rows)]


def newer(rows: list[Line], row: Line) -> None:
    row["policy_versions"][-1] = row["consumed_at_version"][0] + 1


def shifted(by: int) -> Callable[[list[Line], Line], None]:
    """All tokens by so many versions, and the column with them."""

    def change(rows: list[Line], row: Line) -> None:
        row["policy_versions"] = [version + by for version in row["policy_versions"]]
        row["staleness"] -= by

    return change


def stale(row: Line) -> bool:
    return trained(row) and row["staleness"] > 0


def gone(line: Line) -> None:
    """The line is missing."""


def twice(line: Line) -> list[Line]:
    return [line, line]


def with_facts(**facts: Any) -> Callable[[Line], Line]:
    return lambda line: line | facts


def older(line: Line) -> Line:
    return line | {"version": line["version"] - 1}


def short(line: Line) -> Line:
    return line | {"ids": line["ids"][1:]}


def followed_by(**facts: Any) -> Callable[[Line], list[Line]]:
    return lambda line: [line, line | facts]


# What verify says, and what was done to the rows: how the rows change, by one of which kind.
OF_ROWS: tuple[tuple[str, Any, Callable[[Line], bool]], ...] = (
    ("have more than one row", lambda rows, row: [*rows, row], trained),
    ("ended (journal.jsonl) and have no row", lambda rows, row: [r for r in rows if r is not row], trained),
    ("and have no row", lambda rows, row: [r for r in rows if r is not row], dropped),
    ("were never admitted", put(rollout_id=10**6), dropped),
    ("count as trained without a use", put(state="trained"), dropped),
    ("were used and do not count as trained", put(state="dropped"), trained),
    ("ended otherwise in journal.jsonl", put(state="failed"), trained),
    ("were trained at versions that journal.jsonl lacks", put(consumed_at_version=[2, 4, 7]), trained),
    ("were trained over buffer.max_reuse=2", put(consumed_at_version=[2, 4, 7]), trained),
    ("lack a training that journal.jsonl has", put(consumed_at_version=[4]), trained),
    ("were trained twice at one version", put(consumed_at_version=[7, 7]), trained),
    ("newer than the policy that trained them", newer, trained),
    ("have a token older than their replica's weights", shifted(-2), trained),
    ("staleness_mean is not what", shifted(-1), trained),  # a version off by one
    ("of a version that their replica was not given", shifted(1), stale),
    ("over the staleness bound in force", shifted(-3), stale),
    ("have a token older than the one before it", lambda rows, row: row["policy_versions"].append(0), trained),
    ("another staleness than their tokens", put(staleness=0), stale),
    ("name another replica", put(generator_id="generator-7"), trained),
)
# The event, what stands in its place, which of them: the last, or one with these facts.
OF_THE_JOURNAL: tuple[tuple[str, str, Any, dict[str, Any]], ...] = (
    ("were buffered while they were generating", "finished", gone, {}),
    ("were finished while they were admitted", "requeued", followed_by(event="finished"), {}),  # a late result
    ("were buffered while they were buffered", "buffered", twice, {}),  # scored twice
    ("while they were dropped", "dropped", followed_by(event="trained", version=12, last=True), {}),
    ("are in no end", "dropped", gone, {}),
    ("step 12 trained without rollouts", "trained", short, {"version": 11}),
    ("were trained at version 10, when it was 11", "trained", with_facts(version=10), {"version": 11}),
    ("were requeued although", "started", followed_by(event="requeued"), {}),
    ("but it held version", "started", older, {}),
    ("never acknowledged it", "loaded", gone, {}),
    ("version 11 was still on its way when", "published", gone, {"version": 11}),
    ("was published after version", "publish", older, {}),
    ("the replicas hold version 11", "published", gone, {}),
    ("against publish_every=2", "begin", with_facts(publish_every=2), {}),
    ("which it was not asked to", "load", gone, {}),
    ("step 12 follows step 10", "step", gone, {"step": 11}),
    ("an attempt goes on from step", "undone", gone, {}),  # what was undone counts
    ("goes on from step 5", "begin", with_facts(step=5), {}),
    ("bound of 9 came into force", "bound", with_facts(bound=9), {}),
    ("were admitted out of order", "admitted", twice, {}),
    ("lacks a field of its event", "loaded", lambda line: {"event": "loaded", "at": 0.0}, {}),
)
OF_DOCUMENTS: tuple[tuple[str, str, Any], ...] = (
    ("ledger.trained is", "summary.json", lambda s: s["ledger"].update(trained=s["ledger"]["trained"] + 1)),
    ("ledger.dropped is {}", "summary.json", lambda s: s["ledger"].update(dropped={})),
    ("exit_reason is not", "summary.json", lambda s: s.update(exit_reason="interrupted")),
    ("staleness.max is not what metrics.jsonl gives", "summary.json", lambda s: s["staleness"].update(max=0)),
    ("reward is not what", "summary.json", lambda s: s["reward"].update(last=1.0)),
    ("controller.json counts", "checkpoints/*12/controller.json", lambda c: c["ledger"].update(trained=0)),
)
OF_METRICS: tuple[tuple[str, Any], ...] = (
    ("the steps are not 1 to 11", lambda rows: rows[:4] + rows[5:]),
    ("metrics.jsonl has 11 steps, journal.jsonl 12", lambda rows: rows[:-1]),
    ("staleness_mean is not what the rollouts of the step give, in steps 8", set_at(7, staleness_mean=0.5)),
    ("staleness_max is not what the rollouts of the step give, in steps 8", set_at(7, staleness_max=0)),
    ("reward_mean is not what the rollouts of the step give, in steps 8", set_at(7, reward_mean=1.0)),
    ("staleness_bound is not the one in force", set_at(2, staleness_bound=1)),
    ("wall_time falls", set_at(4, wall_time=0.0)),
    ("metrics.jsonl has changed in the 12 lines", set_at(4, loss=0.125)),
    ("policy_version is not the step", set_at(4, policy_version=4)),
)
OF_FILES: tuple[tuple[str, Change], ...] = (
    ("parts 0 are missing", lambda folder: sorted(folder.glob("rollouts/*"))[0].unlink()),
    ("part-00000.parquet cannot be read", lambda folder: sorted(folder.glob("rollouts/*"))[0].write_bytes(b"PAR1")),
    ("lines are missing", without_the_line),
    ("rank-0.parquet cannot be read: Parquet", lambda folder: os.truncate(max(folder.glob("rollout_tokens/*")), 5)),
    ("rank-0.parquet cannot be read: No such file", lambda folder: max(folder.glob("rollout_tokens/*")).unlink()),
    ("lie outside of the run", span_beyond_the_end),
)
LIES: list[tuple[str, Change]] = [
    *((said, in_rows(change, wanted)) for said, change, wanted in OF_ROWS),
    *((said, in_journal(event, change, **facts)) for said, event, change, facts in OF_THE_JOURNAL),
    *((said, in_document(name, change)) for said, name, change in OF_DOCUMENTS),
    *((said, in_metrics(change)) for said, change in OF_METRICS),
    *OF_FILES,
]


@pytest.mark.parametrize(("sentence", "lie"), LIES, ids=[sentence for sentence, _ in LIES])
@pytest.mark.more_but(every=4)
def test_a_lie_is_found(sentence: str, lie: Change, copy: Path) -> None:
    lie(copy)
    assert any(sentence in said for said in verify(copy)), verify(copy)


# --- the command


def test_the_command_says_and_returns_what_it_found(
    honest: Path, copy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["verify", str(honest)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{honest}: holds (") and "12 steps" in said
    LIES[0][1](copy)
    shutil.copytree(honest, tmp_path / "sweep" / "a")
    shutil.copytree(copy, tmp_path / "sweep" / "b")
    assert main(["verify", str(tmp_path / "sweep")]) == 1
    said = capsys.readouterr().out
    assert "2 runs: 1 hold, 1 are broken." in said and "broken: rollouts/part-" in said
    (tmp_path / "empty").mkdir()
    (copy / "journal.jsonl").unlink()
    for wrong in ([str(tmp_path / "empty")], [str(tmp_path / "nowhere")], [], ["--fast", str(honest)], [str(copy)]):
        assert main(["verify", *wrong]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 5 and f"{copy} holds no journal.jsonl" in err[-1]
