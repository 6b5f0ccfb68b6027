"""W&B: one run under ``run_dir/wandb``, offline unless the user is logged in and chose online."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from asyncrlhf.records.show.metric_names import titled
from asyncrlhf.records.show.sinks import RunFacts
from asyncrlhf.records.write.checkpoint import LEARNER_FOLDER, list_checkpoints
from asyncrlhf.records.write.recorder import ROLLOUTS_FOLDER
from asyncrlhf.redaction import redact
from asyncrlhf.scratch import Scratch

_ID_FILE = "run-id.txt"
_QUIET: dict[str, Any] = {"silent": True, "console": "off", "save_code": False}
INIT_TIMEOUT = 20.0  # seconds that it may try to reach its server at a run's start
FINISH_TIMEOUT = 60.0  # seconds that W&B's own process may send after a run's end
_TRYING_AGAIN = (b"retrying", b"giving up")  # of W&B's own log, when it does not reach its server
COMPLETIONS = 16  # rows of a table: some for a look, while rollouts/*.parquet has all
SCRATCH = "asyncrlhf-wandb-"  # the folder of the files of W&B's own processes, which they leave behind
COMPLETION_COLUMNS = ("prompt", "response", "reward", "staleness", "consumed_at_version", "state", "extra")


class WandbSink:
    """A resumed run continues under the id of the first, its steps after the first's.

    Each line is the W&B step of the same number, and every metric's axis is ``step``; ``total/samples``,
    ``total/tokens`` and ``time/wall_time`` are logged too and may be chosen as axes.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._wandb: Any = None
        self._defined: set[str] = {"step"}
        self._unreached = False
        self._log_read = 0  # bytes of W&B's own log
        self._scratch: Scratch | None = None
        self._parts_seen: set[str] = set()  # Parquet files of rollouts

    def start(self, run: RunFacts) -> None:
        import wandb  # a second of imports that a run without W&B need not pay

        self._wandb, self._table, self._error, self._facts = wandb, wandb.Table, wandb.Error, run
        self._logging = run.logging
        self._scratch = Scratch(SCRATCH)
        with self._scratch.of_processes():
            self._open(run, wandb)

    def _open(self, run: RunFacts, wandb: Any) -> None:
        mode = self._logging.wandb
        wandb.setup(wandb.Settings(**{**_QUIET, "mode": mode}))
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            run.say("logging.wandb=online, but no W&B login was found: this run is recorded offline.")
        cause = ""
        try:
            self._run = self._init(mode)
        except wandb.Error as error:
            if mode == "offline":
                raise
            cause = " ".join(str(error).split())
            wandb.teardown()  # its process holds the run's id until it ends
            mode = "offline"
            self._run = self._init(mode)
        self._online = mode == "online"
        # Without its option, `wandb sync` passes over what was begun online.
        self._sync = f"wandb sync {'--include-online ' * self._online}{self._run.settings.sync_dir}"
        if cause:
            run.say(f"W&B could not be reached ({cause}): this run is recorded offline; {self._how_to_send()}")
        self._run.define_metric("step", hidden=True)

    def log(self, metrics: Mapping[str, Any]) -> None:
        row = {titled(key): value for key, value in metrics.items()}
        for name in row.keys() - self._defined:
            self._run.define_metric(name, step_metric="step")
            self._defined.add(name)
        self._run.log(row, step=int(metrics["step"]))
        self._look_at_the_network()
        self._log_completions(self._run, int(metrics["step"]))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary, last completions and model, then end the run and W&B's own process."""
        run, wandb, self._run, self._wandb = self._run, self._wandb, None, None
        try:
            if run is not None:
                run.summary.update(dict(summary))
                self._look_at_the_network(run)
                self._log_completions(run)
                self._hand_in_model(run, wandb)
                run.finish(exit_code=0 if summary.get("exit_reason") == "done" else 1)
        except TimeoutError:
            self._facts.say(f"W&B's server had not received everything at the run's end; {self._how_to_send()}")
        finally:
            if wandb is not None:
                wandb.teardown()
            self._clear()

    def abandon(self) -> None:
        """Kill W&B's own processes, which no longer answer: the thread that waits for them then gets an error."""
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.name().startswith("wandb-"):
                    child.kill()
        self._clear()

    def _clear(self) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def _init(self, mode: str) -> Any:
        facts, logging = self._facts, self._logging
        folder = facts.run_dir / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / _ID_FILE
        # W&B notes the command line beside the machine's facts; one that holds a secret is not for it.
        command = " ".join(sys.argv)
        private = redact(command) != command
        resumed = id_file.exists()
        run_id = id_file.read_text().strip() if resumed else uuid.uuid4().hex[:8]
        id_file.write_text(run_id + "\n")
        return self._wandb.init(
            project=logging.wandb_project,
            **{"job_type": facts.stage, "name": f"{facts.run_dir.parent.name}/{facts.run_dir.name}"}
            | logging.wandb_keywords,
            id=run_id,
            resume="allow" if resumed else None,  # offline, too: else `wandb sync` would replace the parts before
            dir=str(facts.run_dir),
            config=dict(facts.config),
            mode=mode,
            settings=self._wandb.Settings(
                init_timeout=INIT_TIMEOUT,
                finish_timeout=FINISH_TIMEOUT,
                finish_timeout_raises=True,
                x_disable_meta=private,
                **_QUIET,
            ),
        )

    def _log_completions(self, run: Any, step: int | None = None) -> None:
        """A table of the first rollouts of the newest Parquet file, if there is a new one. W&B asks its server about a
        table, and waits or fails without one: the metrics are logged before, and no table while it is not reached."""
        if self._unreached:
            return
        parts = sorted((self._facts.run_dir / ROLLOUTS_FOLDER).glob("part-*.parquet"))
        new = [path for path in parts if path.name not in self._parts_seen]
        self._parts_seen |= {path.name for path in new}
        rows = list(_cells(new[-1])) if new else []
        if not rows:
            return
        try:
            run.log({"completions": self._table(columns=list(COMPLETION_COLUMNS), data=rows)}, step=step)
        except self._error:
            self._tell_unreached()

    def _hand_in_model(self, run: Any, wandb: Any) -> None:
        if not self._logging.wandb_model:
            return
        if self._unreached:
            self._facts.say(
                "logging.wandb_model=true, but W&B's server is not reached: the model stays in checkpoints/."
            )
            return
        found = list_checkpoints(self._facts.run_dir)
        if not found:
            self._facts.say(
                "logging.wandb_model=true, but there is no checkpoint: the run did not end well, or had "
                "checkpoint.at_end=false."
            )
            return
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata={"checkpoint": found[-1].name})
        artifact.add_dir(str(found[-1] / LEARNER_FOLDER / "model"))
        run.log_artifact(artifact)

    def _look_at_the_network(self, run: Any = None) -> None:
        """Tell the user once if W&B cannot reach its server: W&B retries for days and says so in its own log only."""
        run = run or self._run
        if self._unreached or not self._online or run is None:
            return
        log = Path(run.settings.log_internal)
        if not log.is_file():
            return
        with log.open("rb") as file:
            file.seek(self._log_read)
            new = file.read().lower()
            self._log_read = file.tell()
        if any(word in new for word in _TRYING_AGAIN):
            self._tell_unreached()

    def _tell_unreached(self) -> None:
        self._unreached = True
        self._facts.say(f"W&B's server is not reached; the run continues recording, and {self._how_to_send()}")

    def _how_to_send(self) -> str:
        return f"nothing is lost: {self._sync} sends it later."


def _cells(path: Path) -> Iterator[list[Any]]:
    batch = next(pq.ParquetFile(path).iter_batches(COMPLETIONS, columns=list(COMPLETION_COLUMNS)), None)
    for row in batch.to_pylist() if batch is not None else []:
        uses = row["consumed_at_version"]
        row["consumed_at_version"] = uses[-1] if uses else None
        yield [row[name] for name in COMPLETION_COLUMNS]
