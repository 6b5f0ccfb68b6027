"""Which keywords the installed vLLM knows, read from its source: importing vLLM takes many seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from asyncrlhf.validation import check, did_you_mean

_FILES = {"EngineArgs": "engine/arg_utils.py", "SamplingParams": "sampling_params.py"}  # where vLLM defines each


def check_known(key: str, names: Iterable[str], kind: str) -> None:
    """Raise ConfigError for a name that is not a field of vLLM's class ``kind``. Accepts all names if vLLM is not
    installed, or if its source does not define the class in the expected file."""
    fields = _fields(kind)
    for name in names:
        check(
            not fields or name in fields,
            f"{key}.{name} is not a field of the installed vLLM's {kind}{did_you_mean(name, fields)}.",
        )


@cache
def _fields(kind: str) -> frozenset[str]:
    try:
        found = importlib.util.find_spec("vllm")
        source = (Path(str(found.origin)).parent / _FILES[kind]).read_text(encoding="utf-8") if found else ""
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, ImportError):
        return frozenset()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
    members = [member.target for node in classes for member in node.body if isinstance(member, ast.AnnAssign)]
    return frozenset(target.id for target in members if isinstance(target, ast.Name) and target.id[0] != "_")
