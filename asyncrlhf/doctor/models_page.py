"""docs/models.md: how each family of transformers' causal language models runs, found on small models of them.

``python -m asyncrlhf.doctor.models_page docs/models.md [FAMILY...]`` (``make reference``) writes the page, or prints
the rows of some families; ``tests/test_models_page.py`` checks the committed one.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrlhf.doctor.model_ways import REFUSED, Way, engine_way, export_way, learner_way, quiet, without_figures
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.miniature import MISFITS, build_miniature

COLUMNS = ("family", "class", "layers", "learner", "hf engine", "export", "vLLM")
# What published checkpoints of a family state and its default config lacks.
STATED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [22, 22, 20]}
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 4},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}


@dataclass(frozen=True)
class Row:
    """One line of the table; each field is a cell."""

    family: str
    kind: str
    layers: str
    learner: str
    engine: str
    export: str
    vllm: str

    def line(self) -> str:
        cells = [cell.replace("|", "\\|").replace("<", "&lt;") for cell in astuple(self)]
        return f"| {' | '.join(cells)} |"


def families() -> list[str]:
    """Those of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def row(family: str) -> Row:
    """What is found on a small model of ``family``; a family that cannot be built is refused with its sentence."""
    try:
        with quiet():
            model = build_miniature(_shape(family))
    except (ConfigError, *MISFITS) as error:
        named: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        name = named if isinstance(named, str) else named[0]
        why = _cell(Way(REFUSED, " ".join(str(error).split())[:240]))
        return Row(family, name, "-", why, REFUSED, "-", _vllm(name, None))
    trained: dict[str, torch.Tensor] = {}
    learner = learner_way(model, trained)
    engine = engine_way(model, trained)
    with tempfile.TemporaryDirectory() as folder:
        export = export_way(model, Path(folder))
    name = type(model).__name__
    cells = [_cell(way) for way in (learner, engine, export)]
    return Row(family, name, _layers(model), cells[0], cells[1], cells[2], _vllm(name, model))


def _shape(family: str) -> transformers.PretrainedConfig:
    shape: transformers.PretrainedConfig = transformers.AutoConfig.for_model(family, **STATED.get(family, {}))
    if getattr(shape, "is_decoder", None) is False and not shape.is_encoder_decoder:
        shape.is_decoder = True
    return shape


def _cell(way: Way) -> str:
    why = without_figures(way.why).removeprefix("model.path: ").removeprefix("generator.engine=hf ")
    return f"{way.name}: {why[:1].upper()}{why[1:]}" if way.refused and way.why else way.name


def _layers(model: transformers.PreTrainedModel) -> str:
    """The kinds of layers, by the config's list of them or by the names of the model's modules."""
    config: Any = model.config.get_text_config()
    stated = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    kinds = sorted({kind.removesuffix("_attention").replace("_", " ") for kind in stated if isinstance(kind, str)})
    if not kinds:
        words = {"Attention|Attn": "attention", "Mamba|Mixer": "state space", "LSTM|Rwkv": "recurrent"}
        names = {type(module).__name__ for module in model.modules()}
        kinds = [kind for word, kind in words.items() if any(re.search(word, name) for name in names)]
    if any(parameter.ndim == 3 and "expert" in name for name, parameter in model.named_parameters()) or any(
        ".experts.0." in name for name, _ in model.named_parameters()
    ):
        kinds.append("experts")
    return ", ".join(kinds) or "-"


def _vllm(name: str, model: transformers.PreTrainedModel | None) -> str:
    lists = registry()
    if not lists:
        return "not installed"
    if any(name in lists[key] for key in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS") if key in lists):
        return "yes"
    backend = model is not None and getattr(model, "_supports_attention_backend", False)
    return "by transformers' code" if backend else "no"


@cache
def registry() -> dict[str, frozenset[str]]:
    """The classes in each list of vLLM's registry, read from its source: to import it takes many seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0]) / "model_executor" / "models" / "registry.py"
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            found[node.targets[0].id] = frozenset(str(key) for key in keys)
    return found


def page(rows: Sequence[Row], before: str) -> str:
    """docs/models.md with these rows; the text above its table is that of the page ``before``."""
    head = re.split(r"^\d+ families", before, flags=re.MULTILINE)[0]
    head = re.sub(r"(?<=in transformers )[\d.]+(?= runs)", transformers.__version__, head)
    counts = [
        f"{title}: " + ", ".join(f"{count} {name}" for name, count in Counter(cells).most_common())
        for title, cells in (
            ("Learner", [found.learner.split(":")[0] for found in rows]),
            ("hf engine", [found.engine.split(":")[0] for found in rows]),
        )
    ]
    table = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *(found.line() for found in rows)]
    return head + f"{len(rows)} families. {'. '.join(counts)}.\n\n" + "\n".join(table) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    target, *some = sys.argv[1:]
    rows = [row(family) for family in some or families()]
    if some:
        print("\n".join(found.line() for found in rows))
    else:
        Path(target).write_text(page(rows, Path(target).read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
