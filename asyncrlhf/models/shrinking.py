"""Small sizes for the config of any family, by the names of its fields: widths, heads, experts, windows, ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from asyncrlhf.models.layer_choice import LayerChoice

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
