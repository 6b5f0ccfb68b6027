"""The Python API: ``train``, ``evaluate``, ``sweep`` and ``load_runs``, from a script or a notebook.

What ``docs/api.md`` shows is public and versioned; nothing here loads torch before it is called.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrlhf.cli.beside import beside
from asyncrlhf.config.compose import load_config, quoted
from asyncrlhf.config.conversion import conf_folder
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.show.callbacks import Callbacks
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from asyncrlhf.report.frames import Evaluation, Run, Sweep

T = TypeVar("T")
Reward = str | Callable[..., Sequence[float | None]]
Tool = str | Callable[..., Any]
Factory = Callable[[], Any]
REWARD_FOLDER, EPISODE_FOLDER, DATA_STEM = "reward", "episode", "dataset"

# In a notebook without ipywidgets tqdm and Ray say so in their own words; nothing here draws with widgets.
warnings.filterwarnings("ignore", message="IProgress not found")
logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)


def train(
    model: str | Path | None = None,
    dataset: Any = None,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Tool] = (),
    environment_factory: str | Factory | Mapping[str, Factory] | None = None,
    callbacks: Any = (),
    overrides: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """One run, as ``asyncrlhf train``; blocks until it has ended.

    ``model``: a preset (``tiny``), a local folder or a hub name. ``dataset``: a preset of tasks (``arithmetic``), a
    file, folder or name that ``task.path`` takes, or rows: a list of dictionaries, a pandas data frame, a
    ``datasets.Dataset`` or a ``DatasetDict``. ``reward``: any function with TRL's signature, the name
    ``package.module:function``, or a list of those, which are summed, with ``reward_weights`` if given.
    ``tools``: functions that the model may call, and ``environment_factory``: a class, or a dictionary of them of which
    the column ``environment`` chooses, both with TRL's meaning; or their names. The reward of an environment that has
    one is added to ``reward``, which may then be left out, as may the dataset if the environment asks.
    ``callbacks``: one or several, see :class:`~asyncrlhf.records.show.callbacks.Callbacks`. ``settings`` are the
    top-level settings and groups (``steps=20, algorithm="tis"``), ``overrides`` those with a dot
    (``{"async.max_staleness": 4}``).

    Raises ConfigError with one sentence for a wrong setting or input, or the error of a failed run. In a notebook the
    first interrupt ends the run in order after its step, with a checkpoint.
    """
    given = {**settings, **(overrides or {})}
    listeners = Callbacks(callbacks if isinstance(callbacks, list | tuple) else [callbacks])
    check(isinstance(tools, list | tuple), "tools is a list of functions or of their names.")
    if _needs_files(dataset, reward, *tools, *_factories(environment_factory)):
        given["run_dir"] = str(_own_folder(given))
    folder = Path(given.get("run_dir", ""))
    played = _episode(tools, environment_factory, folder)
    asked = _dataset(dataset, folder, environment_factory, str(given.get("task.prompt_key", "prompt")))
    rewarded = _reward(reward, reward_weights, folder, environment_factory)
    config = load_config([*_model(model), *asked, *played, *rewarded, *_overrides(given)])
    check(
        config.restarts == 0,
        f"restarts={config.restarts} starts the run's process again, which here is yours; allowed: 0. The command "
        "`asyncrlhf train` has it; here, call train again with checkpoint.resume=auto.",
    )

    def run() -> dict[str, Any]:
        from asyncrlhf.orchestrator.run import train

        return train(config, listeners)

    with beside():
        summary = _beside_a_running_loop(run, listeners)
    from asyncrlhf.report.frames import Run

    return Run(Path(summary["run_dir"]))


def evaluate(
    model: str | Path | Run | None = None,
    dataset: Any = None,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Tool] = (),
    environment_factory: str | Factory | Mapping[str, Factory] | None = None,
    overrides: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Evaluation:
    """Answers to the held-out prompts, or episodes, as ``asyncrlhf evaluate``. A :class:`Run` as ``model`` takes that
    run's settings, tools and environment among them, and its newest checkpoint. The other arguments are those of
    :func:`train`; of rows every prompt is answered."""
    import pandas as pd

    from asyncrlhf.report.frames import Evaluation, Run

    given = {**settings, **(overrides or {})}
    rows = not isinstance(dataset, str | Path | None)
    if rows and "task.heldout_size" not in given and hasattr(dataset, "__len__"):
        parts = dataset.values() if _is_splits(dataset) else [dataset]
        given["task.heldout_size"] = max(1, sum(map(len, parts)))
    with TemporaryDirectory(prefix="asyncrlhf-evaluate-") as folder:
        asked: list[str] = []
        if dataset is not None or not isinstance(model, Run):  # a run has its own data
            asked = _dataset(dataset, Path(folder), environment_factory, str(given.get("task.prompt_key", "prompt")))
        played = _episode(tools, environment_factory, Path(folder))
        rewarded = _reward(reward, reward_weights, Path(folder), environment_factory)
        rest = [*asked, *played, *rewarded, *_overrides(given)]
        if isinstance(model, Run):
            from asyncrlhf.cli.stages import config_of_run

            own = ((asked, _OWN_DATA), (played, _OWN_EPISODE), (rewarded, _OWN_REWARD))
            emptied = [word for new, words in own if new for word in words]
            rest = ["task.kind=environment" if word == "task=environment" else word for word in rest]
            config = config_of_run(model.path, [*emptied, *rest])
        else:
            config = load_config([*_model(model), *rest])

        def run() -> dict[str, Any]:
            from asyncrlhf.stages.evaluation import evaluate

            return evaluate(config, every_row=rows)

        with beside():
            figures = _beside_a_running_loop(run, Callbacks())
    return Evaluation(figures, pd.DataFrame(figures["samples"]))


def sweep(
    *,
    overrides: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    accept_changed: bool = False,
    **settings: Any,
) -> Sweep:
    """A grid of runs, as ``asyncrlhf sweep``: a list is a choice (``algorithm=["grpo", "tis"]``), a tuple one value.
    ``seeds=3`` trains every configuration with seeds 0, 1 and 2. The same call continues an interrupted sweep.

    Jobs run in processes that import the calling script: put the call under ``if __name__ == "__main__":`` there.
    Raises ConfigError for a wrong setting, KeyboardInterrupt after an interrupt, with every running job recorded.
    """
    from asyncrlhf.cli.sweep import RUNS, run_plan
    from asyncrlhf.report.frames import Sweep
    from asyncrlhf.sweeps.plan import plan_sweep
    from asyncrlhf.sweeps.record import owned

    given = {**settings, **(overrides or {}), **({"sweep.seeds": seeds} if seeds is not None else {})}
    plan = plan_sweep([f"{key}={','.join(map(_text_of_choice, _choices(key, value)))}" for key, value in given.items()])
    folder = RUNS / "sweeps" / plan.folder_name
    with owned(folder), beside():
        if run_plan(plan, accept_changed) > 128:
            raise KeyboardInterrupt
    return Sweep(folder)


def _model(model: str | Path | None) -> list[str]:
    if model is None:
        return []
    return [f"model={model}"] if _is_preset("model", model) else [f"model.path={_text(str(model))}"]


def _dataset(dataset: Any, folder: Path, factory: Any = None, prompt_key: str = "prompt") -> list[str]:
    """The settings of a dataset; rows are written to ``folder``, from where a resumed run reads them again. Without
    prompts in it the environment asks."""
    if dataset is None:
        check(
            not isinstance(factory, Mapping),
            "environment_factory is a dictionary, so that it needs a dataset, with a column environment.",
        )
        return [] if factory is None else ["task=environment"]
    if isinstance(dataset, str | Path) and _is_preset("task", dataset):
        return [f"task={dataset}"]
    path = str(dataset if isinstance(dataset, str | Path) else _written(dataset, folder))
    columns = _columns(dataset)
    if factory is not None and columns is not None and prompt_key not in columns:
        return ["task=environment", f"task.path={_text(path)}"]
    return ["task.kind=prompts", f"task.path={_text(path)}"]


def _written(rows: Any, folder: Path) -> Path:
    if _is_splits(rows):
        _save_quietly(rows, folder / DATA_STEM)
        return folder / DATA_STEM
    if hasattr(rows, "to_parquet"):  # a data frame, or a dataset of the library of that name
        path = folder / f"{DATA_STEM}.parquet"
        rows.to_parquet(str(path))
        return path
    check(
        isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows) and len(rows),
        f"dataset is of the type {type(rows).__name__}{'' if _has_items(rows) else ', and empty'}; allowed: a path, a "
        "list of dictionaries with at least one row, a data frame, a Dataset, or a DatasetDict.",
    )
    path = folder / f"{DATA_STEM}.jsonl"
    path.write_text("".join(json.dumps(dict(row), default=str) + "\n" for row in rows), encoding="utf-8")
    return path


def _columns(dataset: Any) -> set[str] | None:
    """The names of the columns of rows; None for the name of a dataset, which is not read here."""
    if isinstance(dataset, str | Path) or _is_splits(dataset):
        return None
    if hasattr(dataset, "to_parquet"):
        return {*map(str, dataset.column_names if hasattr(dataset, "column_names") else dataset.columns)}
    return {name for row in dataset for name in row}


def _is_splits(rows: Any) -> bool:
    """Whether it is a ``DatasetDict``, of which ``task.split`` chooses a dataset."""
    return isinstance(rows, Mapping) and hasattr(rows, "save_to_disk")


def _save_quietly(rows: Any, folder: Path) -> None:
    """Save datasets without their library's progress bar."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        rows.save_to_disk(str(folder))
    finally:
        if shown:
            enable_progress_bars()


def _has_items(rows: Any) -> bool:
    return not isinstance(rows, Sequence) or len(rows) > 0


def _needs_files(dataset: Any, reward: Any, *others: Any) -> bool:
    """Whether rows or functions must be written to a folder that workers read."""
    functions = [*(reward if isinstance(reward, list | tuple) else [reward]), *others]
    return not isinstance(dataset, str | Path | None) or any(callable(function) for function in functions)


def _factories(environment_factory: Any) -> list[Any]:
    return [*environment_factory.values()] if isinstance(environment_factory, Mapping) else [environment_factory]


def _episode(tools: Sequence[Tool], environment_factory: Any, folder: Path) -> list[str]:
    """The settings of tools and environment; functions and classes are written to ``folder``."""
    found = []
    if tools:
        named = [_target(tool, folder / EPISODE_FOLDER, "tools", _own_name(tool, i)) for i, tool in enumerate(tools)]
        check(len(set(named)) == len(named), f"tools: the functions' names must differ, and these are {named}.")
        found.append(f"episode.tools={_text(named)}")
    if environment_factory is not None:
        name = "environment_factory"
        check(
            isinstance(environment_factory, str) or all(map(callable, _factories(environment_factory))),
            f"{name} is of the type {type(environment_factory).__name__}; allowed: a class, a function without "
            "arguments that returns an environment, a dictionary of them by name, or package.module:name.",
        )
        target = _target(environment_factory, folder / EPISODE_FOLDER, name, name)
        found.append(f"episode.environment={_text(target)}")
    return found


def _reward(
    reward: Reward | Sequence[Reward] | None,
    weights: Sequence[float] | None,
    folder: Path,
    environment_factory: Any = None,
) -> list[str]:
    """The settings of the reward; functions are written to ``folder``. An environment's own reward is added."""
    from asyncrlhf.episodes.world import gives_reward

    several = isinstance(reward, list | tuple)
    check(weights is None or several, "reward_weights needs several functions, reward=[f, g].")
    given = environment_factory is not None and gives_reward(environment_factory)
    if reward is None:
        return ["reward.kind=environment"] if given else []
    folder = folder / REWARD_FOLDER
    if not given and (isinstance(reward, str) or callable(reward)):
        return ["reward.kind=python", f"reward.target={_text(_target(reward, folder, 'reward', 'score'))}"]
    functions: Sequence[Any] = reward if isinstance(reward, list | tuple) else [reward]
    names = [_own_name(part, number) for number, part in enumerate(functions)]
    check(len(set(names)) == len(names) > 0, f"reward: the functions' names must differ, and these are {names}.")
    each = [1.0] * len(names) if weights is None else list(weights)
    check(len(each) == len(names), f"reward_weights has {len(each)} weights for the {len(names)} functions of reward.")
    parts: dict[str, Any] = {
        name: {"kind": "python", "weight": weight, "target": _target(part, folder, "reward", name)}
        for name, part, weight in zip(names, functions, each, strict=True)
    }
    if given:
        own = _own_name(environment_factory, 0) if isinstance(environment_factory, type) else "environment"
        check(own not in parts, f"reward: a function has the environment's name, {own}.")
        parts[own] = {"kind": "environment"}
    return ["reward.kind=sum", *_overrides({"reward.parts": parts})]


def _own_name(part: Any, number: int) -> str:
    name = part.rpartition(":")[2] if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)
    return name if name.isidentifier() else f"part{number}"


def _target(part: Any, folder: Path, key: str, name: str) -> str:
    """The object's name for a setting; an object itself is pickled by value, so that workers and resumed runs can load
    functions of a notebook and closures."""
    if isinstance(part, str):
        return part
    import cloudpickle

    path = folder / f"{name}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_bytes(cloudpickle.dumps(part))
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:  # errors of pickling
        said = name if key == name else f"{key}={name}"
        raise ConfigError(f"{said} cannot be sent to the workers: {error}.") from error
    return f"pickle:{path.absolute()}"


def _own_folder(given: Mapping[str, Any]) -> Path:
    """The run directory, created here if files must be in it before the run starts."""
    from asyncrlhf.orchestrator.run import new_run_dir
    from asyncrlhf.records.write.record_marker import refuse_used_folder
    from asyncrlhf.records.write.whole_files import writing_to

    folder = Path(given.get("run_dir") or new_run_dir(str(given.get("name", "arithmetic"))))
    if given.get("checkpoint.resume", "no") == "no":
        refuse_used_folder(folder)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_preset(group: str, name: str | Path) -> bool:
    return isinstance(name, str) and name.isidentifier() and (conf_folder() / group / f"{name}.yaml").is_file()


def _overrides(given: Mapping[str, Any]) -> list[str]:
    """Dictionaries may add keys, which Hydra accepts only with two plus signs."""
    return [f"{'++' if isinstance(value, Mapping) else ''}{key}={_text(value)}" for key, value in given.items()]


def _choices(key: str, value: Any) -> list[Any]:
    check(not callable(value), f"{key}: a sweep takes package.module:function, because its jobs are other processes.")
    if isinstance(value, list):
        return value
    return [list(value) if isinstance(value, tuple) else value]


def _text_of_choice(value: Any) -> str:
    """In Hydra's grammar; ``interval(0,1)`` and similar functions stay unchanged."""
    return value if isinstance(value, str) and _RANGE.fullmatch(value) else _text(value)


def _text(value: Any) -> str:
    """The value in Hydra's grammar."""
    if isinstance(value, str | Path):
        plain = re.fullmatch(r"[A-Za-z_][\w./-]*", str(value)) and str(value).lower() not in _WORDS
        return str(value) if plain else quoted(str(value))
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    number = value.item() if hasattr(value, "item") else value
    check(
        isinstance(number, int | float), f"{value!r} is not a setting's value; allowed: text, numbers, lists and dicts."
    )
    return repr(number)


# What a run's own settings may hold beside those that name the new data or reward.
_OWN_DATA = ("task.mixture=null", "task.subset=''", "task.split=train", "task.heldout_split=''", "task.streaming=false")
_OWN_EPISODE = ("episode.tools=[]", "episode.environment=''", "episode.agent=''", "episode.agent_command=''")
_OWN_REWARD = ("reward.reward_funcs=[]", "reward.reward_weights=[]", "reward.parts={}")
_RANGE = re.compile(r"(interval|range|tag|int|float|choice|glob)\(.*\)")
_WORDS = ("null", "true", "false", "nan", "inf", "none")  # texts that Hydra would not read as text


def _beside_a_running_loop(run: Callable[[], T], callbacks: Callbacks) -> T:
    """The result of ``run``. A notebook's thread already has an event loop, so the run gets its own thread
    there; an interrupt then asks it to end after its step."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, thread_name_prefix="asyncrlhf") as pool:
        future = pool.submit(run)
        try:
            return future.result()
        except KeyboardInterrupt:
            callbacks.stop_asked = True
            return future.result()
