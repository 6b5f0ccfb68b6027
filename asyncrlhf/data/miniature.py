"""A tiny random model of the same family as any checkpoint, for comparisons before a run that need no weights."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from asyncrlhf.data.layer_choice import LayerChoice
from asyncrlhf.errors import ConfigError

HIDDEN = 64
HEADS = 4
HEAD_SIZE = HIDDEN // HEADS
VOCABULARY = 96
CONTEXT = 512
WINDOW = 8  # tokens of sliding windows, chunks and sparse selections
EXPERTS = 4
STATE = 8

_HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "dim_model")
_HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
_CONTEXT_NAMES = re.compile(
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|context_length|"
    r"model_max_length"
)
_HEAD_COUNT = re.compile(r"(^|_)heads?$|^n_head|num_attention_heads_per_layer|kv_n_heads|num_query_groups")
_HEAD_SIZE = re.compile(r"head_?dim|head_?size|^d_head$|^dim_head$|_d_head$|^kv_channels$|^d_kv$|^rotary_dim$|^d_rel$")
_WIDTH = re.compile(
    r"hidden_size|intermediate|ffn_|(^|_)ffn_dim|^d_model|^n_embd|^emb_dim|embedding_dim|^n_inner|^d_inner|^dff$|"
    r"^dim_ff|^lru_width|embed_dim|proj_dim|embedding_size|feed_forward_size|mid_dim|mamba_d_ssm|^dim_model$|"
    r"^moe_latent_size|^prompt_mid"
)
_WINDOW = re.compile(
    r"^sliding_window$|window_size|sliding_window_size|attention_chunk_size|^local_attention$|index_topk$|"
    r"attn_chunk_length|chunk_size$|^block_size$|^index_block_size$|compressed_attention|^indexer_budget"
)
_EXPERTS = re.compile(r"experts$")
_EXPERTS_USED = re.compile(r"experts_per_tok|moe_k$|topk$|top_k|experts_per_token|moe_top_k")
_GROUPS = re.compile(r"n_?groups?$|num_expert_group$")
_GROUPS_USED = re.compile(r"topk_group$")
_SHARED = re.compile(r"shared_experts$")
_STATE = re.compile(r"state_size$|d_state$|_rank$|lowrank$")
_VOCABULARY = re.compile(r"vocab_size")
_TOKEN_ID = re.compile(r"token_ids?$|_tokens$|token_index$")
MOST_PARAMETERS = 2**22  # of one parameter
# What constructors of configs and models raise for sizes that do not fit each other.
_MISFITS = (
    ValueError, TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError, AssertionError, RuntimeError,
    NotImplementedError, ImportError, StrictDataclassError,
)  # fmt: skip
# Parameters that are no matrix of a linear layer: time constants, decays and convolutions keep their own start.
_OWN_START = re.compile(r"norm|A_log|dt_|(^|\.)D$|time_|conv|slope|decay|ssm_|recurrent_param|ln_|layernorm")


def miniature_config(shape: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """A config of the same family with a few layers of each kind, small widths, windows and vocabulary.

    What makes a family different stays: kinds of layers, grouped heads, the ratio of head sizes, rotary types and
    scalings, soft caps, sinks, dropout probabilities and tied heads. A config with several parts gives that of its
    text part, where that has a causal language model. ``shape`` is not changed. Raises ConfigError if the family
    has no causal language model or refuses the small sizes.
    """
    shape = _text_part(shape)
    try:
        sizes = copy.deepcopy(shape.to_dict())
        _Shrinking(sizes).apply()
        for name in ("transformers_version", "architectures", "_name_or_path", "quantization_config", "auto_map"):
            sizes.pop(name, None)
        return type(shape)(**sizes)
    except _MISFITS as error:
        raise _refusal(shape, error) from error


def build_miniature(
    shape: transformers.PretrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> transformers.PreTrainedModel:
    """A model of :func:`miniature_config`'s sizes in ``eval()``, on the CPU, whose weights depend on ``seed`` only.

    They are large enough that every token of a text changes the logits after it. Torch's global random state stays as
    it is. Raises ConfigError for a family that cannot be built.
    """
    config = miniature_config(shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with torch.device("meta"):
                outline = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            largest = max(outline.parameters(), key=torch.Tensor.numel)
            if largest.numel() > MOST_PARAMETERS:
                raise ValueError(f"a parameter has the shape {list(largest.shape)}")
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except _MISFITS as error:
            raise _refusal(config, error) from error
        _enlarge(model)
    return model.eval()


def _text_part(shape: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    families = transformers.AutoModelForCausalLM._model_mapping
    text = shape.get_text_config(decoder=True)
    if text is not shape and type(text) in families:
        return text
    if type(shape) not in families and not getattr(shape, "auto_map", None):
        raise ConfigError(
            f"model.path: the model type {shape.model_type} does not generate text; allowed: a causal language model."
        )
    return shape


def _refusal(shape: transformers.PretrainedConfig, error: BaseException) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (" ".join(lines[:2]) if lines else type(error).__name__).rstrip(".")
    return ConfigError(f"model.path: no small model of the model type {shape.model_type} can be built: {reason}.")


class _Shrinking:
    """One pass over a config's fields, by their names; the sizes that others depend on are read first."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self._sizes = sizes
        self._hidden = self._first(_HIDDEN_NAMES) or HIDDEN
        self._heads = self._first(_HEAD_NAMES) or HEADS
        self._context = max(
            (v for k, v in sizes.items() if _CONTEXT_NAMES.fullmatch(k) and isinstance(v, int)), default=CONTEXT
        )
        plain = self._hidden / self._heads
        reference = sizes.get("qk_nope_head_dim") or sizes.get("head_dim") or plain
        self._head_size = HEAD_SIZE
        if not sizes.get("qk_nope_head_dim") and reference != plain and sizes.get("head_dim"):
            self._head_size = 2 * HEAD_SIZE if reference > plain else HEAD_SIZE // 2
        self._head_scale = self._head_size / reference
        self._grouped_experts = any(isinstance(sizes.get(k), int) and sizes[k] > 1 for k in ("n_group", "n_groups"))

    def _first(self, names: tuple[str, ...]) -> int | None:
        found = (self._sizes.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    def apply(self) -> None:
        LayerChoice(self._sizes).apply()
        self._walk(self._sizes)
        self._inner_heads()
        self._rotary()

    def _walk(self, sizes: dict[str, Any]) -> None:
        for name, value in sizes.items():
            if isinstance(value, Mapping) and name not in ("rope_parameters", "id2label", "label2id"):
                self._walk(value)  # type: ignore[arg-type]
            elif isinstance(value, list) and value and all(type(entry) is int for entry in value):
                sizes[name] = [self._new(name, entry) for entry in value]
            elif type(value) is int:
                sizes[name] = self._new(name, value)

    def _new(self, name: str, value: int) -> int:
        rules: list[tuple[re.Pattern[str], Callable[[int], int]]] = [
            (_VOCABULARY, lambda v: min(v, VOCABULARY)),
            (_TOKEN_ID, lambda v: v if v < VOCABULARY else 3 + v % (VOCABULARY - 3)),
            (_CONTEXT_NAMES, lambda v: min(v, CONTEXT)),
            (_SHARED, lambda v: min(v, 1)),
            (_GROUPS, lambda v: min(v, 2)),
            (_GROUPS_USED, lambda v: 1),
            (_EXPERTS_USED, lambda v: min(v, 2)),
            (_EXPERTS, self._experts),
            (_STATE, lambda v: min(v, 2 * STATE)),
            (_WINDOW, lambda v: min(v, WINDOW)),
            (_HEAD_COUNT, lambda v: self._head_count(name, v)),
            (_HEAD_SIZE, self._scaled_head),
            (_WIDTH, self._width),
        ]
        if value <= 0:
            return value
        return next((rule(value) for pattern, rule in rules if pattern.search(name)), value)

    def _experts(self, count: int) -> int:
        return min(count, 2 * EXPERTS if self._grouped_experts else EXPERTS)

    def _head_count(self, name: str, count: int) -> int:
        if count == 1:
            return 1
        return HEADS if count >= self._heads or "mamba" in name else max(2, HEADS // max(1, self._heads // count))

    def _scaled_head(self, size: int) -> int:
        return max(2, 2 * round(size * self._head_scale / 2))

    def _width(self, width: int) -> int:
        exact = width * HIDDEN / self._hidden
        return int(exact) if exact == int(exact) and exact >= 8 else max(16, 8 * round(exact / 8))

    def _inner_heads(self) -> None:
        """Sizes that a state-space layer multiplies to its inner width."""

    def _rotary(self) -> None:
        """Lists that have one entry a rotated pair of a head."""


def _enlarge(model: nn.Module) -> None:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _OWN_START.search(name):
                continue
            if parameter.ndim >= 2 and parameter.numel() > max(parameter.shape):
                std = 0.4 if id(parameter) in embeddings else 1.2 / math.sqrt(parameter.shape[-1])
                parameter.normal_(0.0, std)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.1)
