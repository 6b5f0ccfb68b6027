"""One sentence for a setting that does not exist, or whose value is of the wrong kind."""

from __future__ import annotations

import difflib
import re
from typing import Any

from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

# Settings by the names that other libraries and habits give them, where no similar name would lead there.
ALIASES = {
    "lr": "learner.learning_rate",
    "max_steps": "steps",
    "num_steps": "steps",
    "train_batch_size": "batch_size",
    "group_size": "num_generations",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "dataset": "task.path",
    "dataset_name": "task.path",
    "output_dir": "run_dir",
    "kl_coef": "algorithm.beta",
    "clip_range": "algorithm.epsilon",
    "cliprange": "algorithm.epsilon",
    "max_new_tokens": "generator.max_completion_length",
    "use_vllm": "generator.engine",
    "save_steps": "checkpoint.every",
}


def unknown_key(key: str, tree: Any) -> str:
    """The sentence for a setting that does not exist: similar names, and the settings of its group. ``tree``: all
    settings at their defaults."""
    node, parts = tree, key.split(".")
    for depth, part in enumerate(parts):
        if isinstance(node, dict) and part in node:
            node = node[part]
            continue
        parent, wrong = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
        if node is not None and not isinstance(node, dict):
            return f"{key} is not a setting; {parent} holds a single value."
        if not node:
            return f"{key} is a new entry of {parent}; write it with two plus signs in front: ++{key}=VALUE."
        prefix, where = (f"{parent}.", f"in {parent}") if parent else ("", "here")
        close = _closest(parts[-1], [f"{prefix}{name}" for name in node], _leaves(tree))
        hint = f" (did you mean {close}?)" if close else ""
        return f"{wrong} is not a setting{hint}; allowed {where}: {', '.join(sorted(map(str, node)))}."
    return f"{key} cannot be set in this way."


def _closest(word: str, siblings: list[str], leaves: list[str]) -> str:
    """The setting that ``word`` most probably means: a known alias, or the name whose last part is nearest, one of the
    same group first; empty if none is near."""
    if word in ALIASES:
        return ALIASES[word]
    names: dict[str, str] = {}
    for name in [*siblings, *leaves]:
        names.setdefault(name.rpartition(".")[2], name)
    near = difflib.get_close_matches(word, names, n=1)
    return names[near[0]] if near else ""


def _leaves(tree: Any, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in tree.items():
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
    return found


_KINDS = {  # allowed values of a setting, by the type of its default
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "one text",
    list: "a list such as [a,b]",
    dict: "settings of its own, such as KEY.NAME=VALUE",
}


def omegaconf_sentence(error: OmegaConfBaseException, tree: Any) -> str:
    """OmegaConf's several lines as one sentence with the key, the value and what is allowed. ``tree``: all settings at
    their defaults."""
    first = str(error).strip().splitlines()[0].rstrip(".")
    key = str(getattr(error, "full_key", None) or "the configuration").replace("async_", "async")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return unknown_key(key, tree)
    if isinstance(error, InterpolationResolutionError):
        return f"{key} refers to something that cannot be found: {first}."
    default = tree
    for part in key.split("."):
        default = default.get(part) if isinstance(default, dict) else None
    kind = type(default)
    if default is None and (wanted := re.search("converted to (Integer|Float)|valid (bool)", first)):
        kind = {"Integer": int, "Float": float}.get(wanted[1], bool)
    if kind not in _KINDS:
        return f"{key}: {first}."
    match = re.search(r"[Vv]alue '(.*)' (?:of type|is not)|value: (.*)$", first)
    given = "null" if re.search("not Optional|'None'", first) else (match.group(1) or match.group(2)) if match else None
    shown = f"{key}={given}" if given is not None else f"The value of {key}"
    return f"{shown} is of the wrong kind; allowed: {_KINDS[kind].replace('KEY', key)}."
