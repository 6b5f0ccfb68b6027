"""Keeps secrets out of records and messages: credentials in settings and addresses, and texts from the environment.

The secrets are known to the process, not to each message: messages are built in many places, partly by libraries. The
values that a run uses are never changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

HIDDEN = "***"
# A word that makes a setting secret; except those that name a variable, a column, a tokenizer or one of its tokens.
_NAMES = "key|token|secret|passwo?r?d|credential"
_SECRET_NAME = re.compile(_NAMES, re.I)
_HARMLESS_NAME = re.compile(
    r"_env$|^(prompt|answer)_key$|tokeniz|^(pad|eos|bos|unk|sep|cls|mask|stop|end)_token$", re.I
)
# Settings with places and names: every record shows them, even if they come from the environment.
_PLACES = re.compile(r"(^|_)(name|dir|path|resume|folder)$")
_SHORTEST = 4  # characters; shorter texts, or words of YAML, occur in too many texts by chance
_WORDS = frozenset({"true", "false", "null", "none", "auto"})
_ENV = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?([^,}'\"\s]+)")
_IN_TEXTS = (
    (re.compile(r"(?<=://)[^\s/?#]+@"), f"{HIDDEN}@"),  # user and password of an address
    (re.compile(rf"([?&][^=&\s#]*(?:{_NAMES}|pwd|sig|auth)[^=&\s#]*=)[^&\s#'\")]+", re.I), rf"\1{HIDDEN}"),
    (re.compile(r"(\bBearer\s+)[\w.~+/=-]{4,}", re.I), rf"\1{HIDDEN}"),
)  # fmt: skip

_known: dict[str, str] = {}  # a secret and its replacement


def hide(secret: str, shown: str = HIDDEN) -> None:
    """From now on let :func:`redact` replace ``secret`` by ``shown``, in this process."""
    ordinary = len(secret) < _SHORTEST or secret.lower() in _WORDS or (secret.isdigit() and len(secret) < 8)
    if not ordinary:
        _known[secret] = shown


def redact(text: str) -> str:
    """``text`` without secrets."""
    for secret in sorted(_known, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, _known[secret])
    for pattern, shown in _IN_TEXTS:
        text = pattern.sub(shown, text)
    return text


def redacted(tree: Any, name: str = "") -> Any:
    """A tree of settings or of a summary without secrets; ``name``: the setting whose value it is.

    A value from the environment is shown as it was written, ``${oc.env:NAME}``.
    """
    if isinstance(tree, Mapping):
        return {key: redacted(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redacted(value, name) for value in tree]
    if not isinstance(tree, str):
        return tree
    text = redact(tree)
    return HIDDEN if tree and text == tree and is_secret(name) else text


def learn_secrets(config: DictConfig) -> None:
    """Find the secrets in a config whose interpolations are not resolved yet."""
    for name, text in _texts(OmegaConf.to_container(config, resolve=False)):
        if name.endswith("_env"):
            hide(os.environ.get(text, ""))
        elif not _PLACES.search(name):
            for variable in _ENV.findall(text):
                hide(os.environ.get(variable, ""), f"${{oc.env:{variable}}}")
            if is_secret(name) and "${" not in text:
                hide(text)


def hidden_settings(tree: Any, key: str = "") -> list[str]:
    """Keys of settings whose true values are missing from a config read from a file."""
    if isinstance(tree, Mapping):
        return [k for name, value in tree.items() for k in hidden_settings(value, f"{key}.{name}".lstrip("."))]
    values = tree if isinstance(tree, list) else [tree]
    return [key] if any(isinstance(value, str) and HIDDEN in value for value in values) else []


def is_secret(name: str) -> bool:
    """Whether the name of a setting or of a variable indicates a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def _texts(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(name of the setting, text) of every text."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value, name)
    elif isinstance(tree, str):
        yield name, tree
