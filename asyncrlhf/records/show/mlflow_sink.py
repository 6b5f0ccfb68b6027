"""MLflow: one run on the tracking server that MLFLOW_TRACKING_URI names, else in MLflow's default place."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from asyncrlhf.records.show.metric_names import titled
from asyncrlhf.records.show.sinks import RunFacts
from asyncrlhf.records.write.recorder import flatten

_ID_FILE = "mlflow-run-id.txt"
_PARAMS_A_CALL, _VALUE_LENGTH = 100, 500  # limits of every MLflow server
_STATUS = {"done": "FINISHED", "interrupted": "KILLED"}


class MlflowSink:
    """Settings become the run's parameters, the run's name its experiment. A resumed run continues under its id."""

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def start(self, run: RunFacts) -> None:
        from mlflow.tracking import MlflowClient

        client = MlflowClient()
        id_file = run.run_dir / _ID_FILE
        if id_file.exists():
            self._id = id_file.read_text().strip()
            client.update_run(self._id, "RUNNING")
        else:
            name = str(run.config.get("name", "asyncrlhf"))
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else client.create_experiment(name)
            label = f"{run.run_dir.parent.name}/{run.run_dir.name}"
            group = run.logging.wandb_keywords.get("group", "")
            tags = {"stage": run.stage, **({"group": group} if group else {})}
            self._id = client.create_run(experiment, run_name=label, tags=tags).info.run_id
            id_file.write_text(self._id + "\n")
            self._log_params(client, flatten(run.config))
        self._client = client

    def _log_params(self, client: Any, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_allowed(name), str(value)[:_VALUE_LENGTH]) for name, value in settings.items()]
        for first in range(0, len(params), _PARAMS_A_CALL):
            client.log_batch(self._id, params=params[first : first + _PARAMS_A_CALL])

    def log(self, metrics: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        step, now = int(metrics["step"]), int(time.time() * 1000)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "step"}
        self._client.log_batch(
            self._id, metrics=[Metric(_allowed(titled(name)), float(v), now, step) for name, v in numbers.items()]
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id, _STATUS.get(str(summary.get("exit_reason")), "FAILED"))


def _allowed(name: str) -> str:
    """The name in MLflow's characters, letters, digits and ``_-. :/``: ``lag_9+/kl`` becomes ``lag_9_/kl``."""
    return re.sub(r"[^\w\-. :/]", "_", name)
