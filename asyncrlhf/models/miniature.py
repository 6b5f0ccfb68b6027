"""A tiny random model of the same family as any checkpoint, for comparisons before a run that need no weights.

The layers that it keeps, one or two of each kind; small sizes by the names of a config's fields; and its weights.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from asyncrlhf.errors import ConfigError

LAYER_COUNTS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|num_blocks|num_(encoder|decoder)_layers|(encoder|decoder)_layers|"
    r"num_layers_per_stack)$"
)
# The number of layers from the first, or from the last, that are of another kind.
_FIRST = re.compile(r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$")
_LAST = re.compile(r"^num_kv_shared_layers$")
_PERIODS = re.compile(r"_(period|interval|step|freq|every_n_layers|pattern)$")
_OFFSETS = re.compile(r"_offset$")
_INDICES = re.compile(r"(layers|idxs|layer_ids|layer_indices)$")
LONGEST_PERIOD = 3
EACH = 2  # layers of one kind, where a config has few kinds
FEW = 3


class LayerChoice:
    """Chooses the layers of ``sizes``, a config as a dictionary, and writes the shorter lists and counts into it."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self._sizes = sizes
        counts = [v for k, v in sizes.items() if LAYER_COUNTS.match(k) and isinstance(v, int)]
        self._count = max(counts, default=0)

    def apply(self) -> None:
        """Keep the first layers of each kind; fields that name layers by their place are renumbered."""
        if not self._count:
            return
        kept = self._kept()
        sizes = self._sizes
        # A shorter list of kinds repeats over the layers: the first round has all of them.
        rounds = [len(v) for k, v in sizes.items() if k.endswith("_types") and self._repeats(v)]
        if rounds:
            kept = list(range(min(max(rounds), self._count)))
        periods = len(set(self._kinds())) == 1 and any(
            _PERIODS.search(k) and type(v) is int and v > 1 for k, v in sizes.items()
        )
        while periods and len(kept) < min(2 * LONGEST_PERIOD, self._count):
            kept = sorted({*kept, next(i for i in range(self._count) if i not in kept)})
        for name, value in sizes.items():
            sizes[name] = self._renumbered(name, value, kept)

    def _kinds(self) -> list[Any]:
        found: list[list[str]] = [[] for _ in range(self._count)]
        for name, value in self._sizes.items():
            for i in range(self._count):
                if isinstance(value, list) and len(value) == self._count and not self._places(name, value):
                    found[i].append(str(value[i]))
                elif self._places(name, value):
                    found[i].append(str(i in value))
                elif self._by_place(value):
                    found[i].append(str({int(k): v for k, v in value.items()}.get(i)))
                elif _FIRST.match(name) and isinstance(value, int):
                    found[i].append(str(i < value))
                elif _LAST.match(name) and isinstance(value, int):
                    found[i].append(str(i >= self._count - value))
        return [tuple(kind) for kind in found]

    def _kept(self) -> list[int]:
        kinds = self._kinds()
        each = EACH if len(set(kinds)) <= FEW else 1
        return [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < each]

    def _renumbered(self, name: str, value: Any, kept: list[int]) -> Any:
        if LAYER_COUNTS.match(name) and isinstance(value, int):
            return min(value, len(kept))
        if self._places(name, value):
            return [kept.index(i) for i in value if i in kept]
        if isinstance(value, list) and len(value) == self._count:
            return [value[i] for i in kept]
        if self._by_place(value):
            return {type(k)(str(kept.index(int(k)))): v for k, v in value.items() if int(k) in kept}
        if type(value) is not int:
            return value
        if _FIRST.match(name):
            return sum(i < value for i in kept)
        if _LAST.match(name):
            return sum(i >= self._count - value for i in kept)
        if _PERIODS.search(name):
            return min(value, LONGEST_PERIOD)
        if _OFFSETS.search(name):
            return min(value, LONGEST_PERIOD - 1)
        return value

    def _places(self, name: str, value: Any) -> bool:
        """Whether ``value`` lists places of layers."""
        if not isinstance(value, list) or not _INDICES.search(name) or not all(type(i) is int for i in value):
            return False
        return all(0 <= i < self._count for i in value) and len(set(value)) == len(value)

    def _repeats(self, value: Any) -> bool:
        return isinstance(value, list) and 1 < len(value) < self._count and all(isinstance(kind, str) for kind in value)

    def _by_place(self, value: Any) -> bool:
        return (
            isinstance(value, dict)
            and bool(value)
            and all(str(k).isdigit() for k in value)
            and not (all(str(v).startswith("LABEL_") for v in value.values()))
        )


HIDDEN = 64
HEADS = 4
HEAD_SIZE = HIDDEN // HEADS
VOCABULARY = 96
CONTEXT = 512
WINDOW = 8  # tokens of sliding windows, chunks and sparse selections
SOFT_CAP = 2.0  # a cap of 50 would hardly change the small scores of a small model
EXPERTS = 4
# A token's score is 0 where no head has a positive one, and the number of tokens breaks ties: few heads have many.
INDEX_HEADS = 16
RANK = 16  # of low-rank projections, and the most elements of a state
WIDTH_STEP = 8  # rows of matrices lie at multiples of 16 bytes, as some kernels want

# For fields without a value, where the family's constructor needs one.
FILLINGS: dict[str, Any] = {
    "head_dim": HEAD_SIZE,
    "num_key_value_heads": HEADS // 2,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}

_HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "dim_model")
_HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
_HEAD_SIZE_NAMES = ("qk_nope_head_dim", "head_dim", "d_head", "dim_head", "attention_head_size")
_CONTEXT = re.compile(
    r"max_position_embeddings$|^n_positions$|^n_ctx$|^max_seq_len$|^max_\w+_positions$|^context_length$|"
    r"^model_max_length$"
)
_INNER = (  # a state-space layer's heads, their size and the factor of its inner width
    (("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
     ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"), ("mamba_expand", "expand")),
)  # fmt: skip


class Shrinking:
    """One pass over a config as a dictionary, in place; what other sizes depend on is read first."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self._sizes = sizes
        self._before = dict(sizes)
        self._hidden = self._first(_HIDDEN_NAMES) or HIDDEN
        self._heads = self._first(_HEAD_NAMES) or HEADS
        contexts = [v for k, v in sizes.items() if _CONTEXT.search(k) and type(v) is int]
        self._context_scale = min(1.0, CONTEXT / max(contexts, default=CONTEXT))
        plain = self._hidden / self._heads
        reference = self._first(_HEAD_SIZE_NAMES) or plain
        size = HEAD_SIZE
        if not sizes.get("qk_nope_head_dim") and reference != plain:
            size = 2 * HEAD_SIZE if reference > plain else HEAD_SIZE // 2
        self._head_scale = size / reference
        self._rules: list[tuple[re.Pattern[str], Callable[[str, int], int]]] = [
            (re.compile(pattern), rule)
            for pattern, rule in (
                (r"vocab_size", _at_most(VOCABULARY)),
                (r"ngram_vocab|_group_vocab", _at_most(VOCABULARY)),
                (r"token_ids?$|_tokens$|token_index$|^mask_index$", _inside),
                (r"^original_max_position", lambda _, v: self._switch(v)),
                (_CONTEXT.pattern, _at_most(CONTEXT)),
                (r"shared_experts$", _at_most(2)),
                (r"topk_group$", _at_most(1)),
                (r"n_?groups?$|num_expert_group$", _at_most(2)),
                (r"window|chunk_size$|chunk_length$|^local_attention$|index_topk$|block_size$|compressed_attention$|"
                 r"^indexer_budget$", _at_most(WINDOW)),
                (r"experts_per_tok|moe_k$|topk$|top_k", _at_most(2)),
                (r"experts$|^zero_expert_num$", self._experts),
                (r"state_size$|d_state$|_rank$|lowrank$", _at_most(RANK)),
                (r"head_?dim|head_?size|d_head$|^kv_channels$|^d_kv$|^rotary_dim$|^d_rel$", self._head_size),
                (r"(^|_)heads?$|attention_heads_per_layer$|query_groups$", self._head_count),
                (r"hidden_size|intermediate|(^|_)ffn_|ffn_dim|^d_model$|^n_embd$|^n_inner$|^d_inner$|^dff$|^dim_ff$|"
                 r"^lru_width$|embed_dim$|emb_dim$|embedding_dim$|proj_dim$|embedding_size$|feed_forward_size$|"
                 r"mid_dim$|^mamba_d_ssm$|^dim_model$|^moe_latent_size$", self._width),
            )
        ]  # fmt: skip

    def _first(self, names: tuple[str, ...]) -> int | None:
        found = (self._sizes.get(name) for name in names)
        return next((value for value in found if type(value) is int and value > 0), None)

    def apply(self) -> None:
        LayerChoice(self._sizes).apply()
        self._walk(self._sizes)
        self._inner_widths()

    def _walk(self, sizes: dict[str, Any]) -> None:
        for name, value in sizes.items():
            if name in ("id2label", "label2id"):
                continue
            if isinstance(value, dict):
                if "rope" in name:
                    self._rotary(value)
                else:
                    self._walk(value)
            elif isinstance(value, list) and value and all(type(entry) is int for entry in value):
                sizes[name] = [self._new(name, entry) for entry in value]
            elif type(value) is int:
                sizes[name] = self._new(name, value)
            elif type(value) is float and "softcap" in name:
                sizes[name] = min(value, SOFT_CAP)

    def _new(self, name: str, value: int) -> int:
        if value <= 0:
            return value
        return next((rule(name, value) for pattern, rule in self._rules if pattern.search(name)), value)

    def _experts(self, name: str, count: int) -> int:
        grouped = any((self._before.get(k) or 1) > 1 for k in ("n_group", "num_expert_group"))
        return min(count, 2 * EXPERTS if grouped else EXPERTS)

    def _head_count(self, name: str, count: int) -> int:
        """``HEADS`` for the most heads of one kind of layer; kinds are told by the first word of the name."""
        if count == 1:
            return 1
        kind = name.partition("_")[0]
        if kind in ("index", "indexer"):
            return min(count, INDEX_HEADS)
        most = self._heads
        if kind in ("linear", "mamba", "swa"):
            alike = (v for k, v in self._before.items() if k.startswith(kind) and k.endswith("heads"))
            most = max(v for v in alike if type(v) is int)
        return min(count, HEADS if count >= most else max(2, HEADS * count // most))

    def _head_size(self, name: str, size: int) -> int:
        scale = self._head_scale
        if name.startswith("linear"):
            alike = (v for k, v in self._before.items() if k.startswith("linear") and k.endswith("head_dim"))
            scale = HEAD_SIZE / min(v for v in alike if type(v) is int)
        return max(2, 2 * round(size * scale / 2))

    def _width(self, name: str, width: int) -> int:
        return max(WIDTH_STEP, WIDTH_STEP * round(width * HIDDEN / self._hidden / WIDTH_STEP))

    def _inner_widths(self) -> None:
        """Keep heads times their size at a state-space layer's inner width."""
        before, sizes = self._before, self._sizes
        for heads_names, size_names, expand_names in _INNER:
            heads, size, expand = (
                next((k for k in names if type(before.get(k)) in (int, float)), None)
                for names in (heads_names, size_names, expand_names)
            )
            if heads is None or size is None or expand is None:
                continue
            inner = before[heads] * before[size]
            if type(before.get("mamba_d_ssm")) is int and inner == before["mamba_d_ssm"]:
                sizes["mamba_d_ssm"] = sizes[heads] * sizes[size]
            elif inner == before[expand] * self._hidden:
                sizes[size] = int(sizes[expand] * HIDDEN) // sizes[heads]

    def _switch(self, place: int) -> int:
        """Where rotations change: in the same part of the context as before."""
        return max(2 * WINDOW, round(place * self._context_scale))

    def _rotary(self, rope: dict[str, Any]) -> None:
        """Lists with an entry a rotated pair, or with parts of all pairs, get those of the small head."""
        for name, value in rope.items():
            if isinstance(value, dict):
                self._rotary(value)
            elif name == "original_max_position_embeddings" and value:
                rope[name] = self._switch(value)
            elif isinstance(value, list) and value and "section" in name:
                total = max(len(value), round(sum(value) * self._head_scale))
                parts = [max(1, int(part * total / sum(value))) for part in value]
                parts[0] += total - sum(parts)
                rope[name] = parts
            elif isinstance(value, list) and len(value) > 1:
                count = max(1, round(len(value) * self._head_scale))
                rope[name] = [value[i * len(value) // count] for i in range(count)]


def _at_most(limit: int) -> Callable[[str, int], int]:
    return lambda _, value: min(value, limit)


def _inside(name: str, token: int) -> int:
    """An id of the small vocabulary; small ids stay."""
    return token if token < VOCABULARY else 3 + token % (VOCABULARY - 3)


MOST_PARAMETERS = 2**22  # of one parameter
# What constructors of configs and models raise for sizes that do not fit each other.
MISFITS = (
    ValueError, TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError, AssertionError, RuntimeError,
    NotImplementedError, ImportError, StrictDataclassError,
)  # fmt: skip
# Parameters that are no matrix of a linear layer: norms, time constants and decays keep their own start.
_OWN_START = re.compile(r"norm|A_log|dt_|(^|\.)D$|time_|slope|decay|recurrent_param|ln_")


def miniature_config(shape: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """A config of the same family with a few layers of each kind, small widths, windows and vocabulary.

    What makes a family different stays: kinds of layers, grouped heads, the ratio of head sizes, rotary types and
    scalings, soft caps, sinks, dropout probabilities and tied heads. A config with several parts gives that of its
    text part, where that has a causal language model. ``shape`` is not changed. Raises ConfigError if the family
    has no causal language model or refuses the small sizes.
    """
    return build_miniature(shape).config


def build_miniature(
    shape: transformers.PretrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> transformers.PreTrainedModel:
    """A model of :func:`miniature_config`'s sizes in ``eval()``, on the CPU, whose weights depend on ``seed`` only.

    They are large enough that every token of a text changes the logits after it. Torch's global random state stays as
    it is. Raises ConfigError for a family that cannot be built, or that does not map a text to finite logits.
    """
    text, create = _text_part(shape)
    failed: BaseException | None = None
    for fill in (False, True):  # fields without a value keep none, unless the family needs one
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return _built(shrunk(text, fill), create, dtype)
        except MISFITS as error:
            failed = failed or error
    assert failed is not None
    raise _refusal(shape, failed) from failed


@dataclass(frozen=True)
class Family:
    """What a model's config says of it, as a key of what was found on a small model of the same family."""

    key: str
    config: transformers.PretrainedConfig = field(compare=False)

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Family:
        facts = model.config.to_dict() | {"_name_or_path": type(model).__name__}
        return cls(json.dumps(facts, sort_keys=True, default=str), model.config)

    def small(self) -> transformers.PreTrainedModel | None:
        """The small model, in float64; None if none can be built, as of a checkpoint's own code that no config
        describes."""
        try:
            return build_miniature(self.config, dtype=torch.float64)
        except ConfigError:
            return None


def _built(
    config: transformers.PretrainedConfig, create: Callable[..., Any], dtype: torch.dtype
) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        outline = create(config)
    largest = max(outline.parameters(), key=torch.Tensor.numel)
    if largest.numel() > MOST_PARAMETERS:
        raise ValueError(f"a parameter has the shape {list(largest.shape)}")
    model: transformers.PreTrainedModel = create(config, dtype=dtype).eval()
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products have no float64
    _enlarge(model)
    _spread(model)
    return model


def _text_part(
    shape: transformers.PretrainedConfig,
) -> tuple[transformers.PretrainedConfig, Callable[..., Any]]:
    """The config of the part that generates text, and what creates its model."""
    families = transformers.AutoModelForCausalLM._model_mapping
    text = shape.get_text_config(decoder=True)
    if type(text) is type(shape):  # the config of an encoder and a decoder, of which it is a part without a name
        text = shape
    for config in (text, shape):
        if type(config) in families:
            own: Any = families[type(config)]
            own = own[0] if isinstance(own, tuple) else own
            # A config with several parts may name the class of its text part.
            return (text if own.config_class is type(text) else config), own._from_config
    if getattr(shape, "auto_map", None):  # code of the checkpoint, which ran when the config was loaded
        return shape, lambda config, **more: transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=True, **more
        )
    raise ConfigError(
        f"model.path: the model type {shape.model_type} does not generate text; allowed: a causal language model."
    )


def shrunk(shape: transformers.PretrainedConfig, fill: bool = False) -> transformers.PretrainedConfig:
    """The small sizes alone, which the family may refuse. ``fill``: fields without a value get one."""
    sizes = copy.deepcopy(shape.to_dict())
    if fill:
        sizes |= {name: value for name, value in FILLINGS.items() if name in sizes and sizes[name] is None}
    Shrinking(sizes).apply()
    for name in ("transformers_version", "quantization_config"):
        sizes.pop(name, None)
    _strip_parts(sizes)
    return type(shape)(**sizes)


def _strip_parts(sizes: dict[str, Any]) -> None:
    """Leave out what every config has from those inside another one, which may accept their own fields only."""
    for part in sizes.values():
        if isinstance(part, dict) and "model_type" in part:
            for name in ("_name_or_path", "output_attentions", "transformers_version"):
                part.pop(name, None)
            _strip_parts(part)


def _refusal(shape: transformers.PretrainedConfig, error: BaseException) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (" ".join(lines[:2]) if lines else type(error).__name__).rstrip(".")
    return ConfigError(f"model.path: no small model of the model type {shape.model_type} can be built: {reason}.")


@torch.no_grad()
def _spread(model: transformers.PreTrainedModel) -> None:
    """Scale the output layer so that logits vary by some units; runs the model once."""
    head = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(3, 3 + 2 * WINDOW, device=model.device)[None] % embeddings.num_embeddings
    spread = float(model(input_ids=ids, use_cache=False).logits.float().std())
    if not math.isfinite(spread):
        raise ValueError("its logits are not finite")
    if isinstance(head, nn.Linear) and spread > 0 and not 1 <= spread <= 6:
        head.weight.mul_(min(2.0 / spread, 10.0))


def _enlarge(model: nn.Module) -> None:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias") and parameter.min() >= 0:
                parameter.fill_(-3.0)  # else a state forgets a token within some others, and faults with it
            if _OWN_START.search(name):
                continue
            convolution = parameter.ndim == 3 and parameter.shape[1] == 1
            if parameter.ndim >= 2 and parameter.numel() > max(parameter.shape) and not convolution:
                std = 0.4 if id(parameter) in embeddings else 1.2 / math.sqrt(parameter.shape[-1])
                parameter.normal_(0.0, std)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.1)
