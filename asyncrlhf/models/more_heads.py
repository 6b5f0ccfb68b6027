"""Heads of multi-token prediction in a checkpoint: transformers loads none of them, so that they neither train nor are
exported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# In a configuration: how many there are, by the two names that vLLM reads.
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_NAMED = re.compile(r"(?:^|\.)mtp[._]")
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def more_heads(names: Iterable[str], shape: Any) -> list[str]:
    """Those of a checkpoint's tensors ``names`` that belong to such heads: named so, or of layers after the last."""
    last = int(getattr(shape.get_text_config(), "num_hidden_layers", 2**31))

    def beyond(name: str) -> bool:
        layer = _LAYER.match(name)
        return bool(_NAMED.search(name)) or (layer is not None and int(layer[1]) >= last)

    return sorted(filter(beyond, names))


def forget_heads(config: Any) -> None:
    """Let the configuration of a loaded model promise no such heads: engines that load an export would look for
    their weights."""
    inner = config.get_text_config()
    for name in _COUNTS:
        if getattr(inner, name, 0):
            setattr(inner, name, 0)
