"""The hf engine's forward pass over packed tokens: a lean one for the Llama family, transformers' for others."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import nn

from asyncrlhf.engines.hf.decode_graphs import DecodeGraphs
from asyncrlhf.engines.hf.kept_group import Due, KeptGroup
from asyncrlhf.engines.hf.kv_cache import ForwardPlan, Kept, KVCache
from asyncrlhf.engines.hf.layer_shapes import find_layers
from asyncrlhf.engines.hf.slot_attention import Scoring
from asyncrlhf.engines.hf.slots import Prefill, SlotTable, plan_score, plan_step
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.copies import all_to_device
from asyncrlhf.types import IntArray

ATTENTION_NAME = "asyncrlhf_slots"

_LEAN_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # the others depend on the sequence's length


class Passes(ABC):
    """The forward passes of the hf engine's rows, and what is kept of each row's tokens between two of them."""

    capacity = 0  # tokens for which each row has room; 0: a cache that grows with its rows

    @abstractmethod
    def reserve(self, length: int, response: int = 0) -> None:
        """Make room for ``length`` tokens in every row, of which ``response`` at most are a response."""

    @abstractmethod
    def release(self) -> None:
        """Free what is kept of all rows, and its memory. Rows in flight are prefilled again."""

    @abstractmethod
    def restore(self) -> None:
        """Make the room again that was released."""

    @property
    def nbytes(self) -> int:
        """Of the cache, where it is ours."""
        return 0

    def stayed(self, row: int, part: slice) -> dict[str, NDArray[np.bool_]]:
        """Of a row that has lost tokens, which of the positions ``part`` are still there, by layer and key-value head
        of those that evict."""
        return {}

    @abstractmethod
    def can_copy(self, tokens: int, prompt: int) -> bool:
        """Whether a row with ``tokens`` tokens, whose first ``prompt`` are its prompt, still gives another row what
        :meth:`copy_rows` needs for that prompt."""

    @abstractmethod
    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Give rows ``target`` what is kept of the first ``length`` tokens of rows ``source``, or of more of them."""

    @abstractmethod
    def evict(self, table: SlotTable) -> None:
        """Before the prefills of a step are chosen: let keys and values go where a row's share is full."""

    @abstractmethod
    def step(self, table: SlotTable, prefills: Sequence[Prefill]) -> torch.Tensor:
        """One decode iteration of all rows of ``table`` together with ``prefills`` -> logits [table.count, V], of which
        those of rows that are not ready have no meaning."""

    @abstractmethod
    def score(self, text: IntArray) -> torch.Tensor:
        """The logits [L, V] of a text alone [L]; nothing is kept."""


class SlotPasses(KVCache, Passes):
    """Packed passes over a static KV cache with one row per slot."""

    def __init__(
        self, model: transformers.PreTrainedModel, slots: int, kept: Kept | None = None, graphs: bool = False
    ) -> None:
        """``graphs``: decode iterations become CUDA graphs, which know neither ``kept`` nor hooks of the model. Raises
        ConfigError for a model whose layers do not all call transformers' attention interface, or with ``kept`` all
        have a sliding window."""
        super().__init__(find_layers(model), slots + graphs, model.dtype, model.device, kept)
        if kept is not None and not any(isinstance(group, KeptGroup) for group in self.groups):
            raise ConfigError(
                f"generator.cache={kept.config.policy} has nothing to evict: all layers of {type(model).__name__} have "
                "a sliding window, which bounds their cache; allowed: full."
            )
        self._forward = LeanForward(model) if is_lean(model) else AttentionInterfaceForward(model)
        self.graphs = DecodeGraphs(self, self._forward, self._forward.held, slots) if graphs else None

    def reserve(self, length: int, response: int = 0) -> None:
        before = self.capacity
        super().reserve(length, response)
        if self.graphs is not None and self.capacity != before:
            self.graphs.drop()

    def release(self) -> None:
        super().release()
        if self.graphs is not None:
            self.graphs.drop()

    def step(self, table: SlotTable, prefills: Sequence[Prefill]) -> torch.Tensor:
        logits = None if self.graphs is None or prefills else self.graphs.step(table)
        if logits is not None:
            return logits
        return self._forward(self, self.placed(plan_step(table, prefills, self)))

    def evict(self, table: SlotTable) -> None:
        if self.kept is None or not len(rows := table.due(self.kept.budget)):
            return
        facts = table.rows[rows]
        given = [rows, facts["prompt_length"], facts["evicted"], facts["length"] - 1]
        if self.kept.config.policy == "separators":
            given.append(self.kept.separators(table.tokens[rows]))
        on_device = all_to_device([torch.from_numpy(np.ascontiguousarray(x)) for x in given], self.device)
        due = Due(*on_device, *([None] * (5 - len(given))))
        for group in self.groups:
            if isinstance(group, KeptGroup):
                group.evict(due)
        table.rows["evicted"][rows] += self.kept.config.every

    def score(self, text: IntArray) -> torch.Tensor:
        return self._forward(self, self.placed(plan_score(text)))


def is_lean(model: transformers.PreTrainedModel) -> bool:
    """Whether :class:`LeanForward` supports this model: its class, its rotary embedding and plain linear layers."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if type(model).__name__ not in _LEAN_CLASSES or rope.get("rope_type", "default") not in _STATIC_ROPE:
        return False
    layers: Any = model.model.layers
    fused = ((a.q_proj, a.k_proj, a.v_proj, m.gate_proj, m.up_proj) for a, m in ((x.self_attn, x.mlp) for x in layers))
    return all(type(projection) is nn.Linear for projections in fused for projection in projections)


def _fuse(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias for several layers with one input; their parameters become views of it.

    The views still receive new weights in place, so that no load needs another fusion.
    """

    def joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat([parameter.data for parameter in parameters])
        pieces = torch.split(whole, [len(parameter) for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.data = piece
        return whole

    biases = [linear.bias for linear in linears if linear.bias is not None]
    return joined([linear.weight for linear in linears]), joined(biases) if biases else None


class LeanForward:
    """Llama, Mistral and Qwen2 in a third of the operations: fused projections, a rotary table, no wrappers."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model = model
        trunk: Any = model.model
        self._trunk = trunk
        config = model.config
        self._layers = list(trunk.layers)
        self._qkv = [_fuse((a.q_proj, a.k_proj, a.v_proj)) for a in (layer.self_attn for layer in self._layers)]
        self._gate_up = [_fuse((m.gate_proj, m.up_proj)) for m in (layer.mlp for layer in self._layers)]
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = self._layers[0].self_attn.head_dim
        self._scoring = [Scoring(layer.self_attn.scaling) for layer in self._layers]
        self._rotary = torch.empty(0, 2, 1, self._head_dim)

    def _rotation(self, positions: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, D], the sines of the first half negated, from a table that grows with the longest
        position."""
        if longest >= len(self._rotary):
            weight = self._trunk.embed_tokens.weight
            steps = torch.arange(2 * longest + 64, device=weight.device)
            cos, sin = self._trunk.rotary_emb(weight[:1, None], position_ids=steps[None])
            sin[..., : self._head_dim // 2].neg_()
            self._rotary = torch.stack((cos[0], sin[0]), dim=1)[:, :, None]
        both = self._rotary[positions]
        return both[:, 0], both[:, 1]

    @staticmethod
    def _norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        width, epsilon = hidden.shape[-1:], norm.variance_epsilon
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, width, norm.weight, epsilon)
        if hidden.dtype == torch.float64:
            return norm(hidden)  # which computes in float32
        # With the weight it would round low precision at another place than the learner's module does.
        return norm.weight * F.rms_norm(hidden, width, None, epsilon)

    def held(self) -> list[torch.Tensor]:
        """What a pass reads, and a later one may replace."""
        return [self._rotary]

    def __call__(self, cache: KVCache, plan: ForwardPlan) -> torch.Tensor:
        hidden = F.embedding(plan.input_ids, self._trunk.embed_tokens.weight)
        cos, sin = self._rotation(plan.positions, plan.longest)
        rotated_heads = self._heads + self._kv_heads
        half = self._head_dim // 2
        for i, layer in enumerate(self._layers):
            qkv = F.linear(self._norm(layer.input_layernorm, hidden), *self._qkv[i]).view(
                len(hidden), -1, self._head_dim
            )
            straight = qkv[:, :rotated_heads]
            turned = torch.cat((straight[..., half:], straight[..., :half]), dim=-1)
            straight.mul_(cos).add_(turned.mul_(sin))
            query, key = straight[:, : self._heads], straight[:, self._heads :]
            attended = cache.attend(i, query, key, qkv[:, rotated_heads:], self._scoring[i], plan)
            if i == len(self._layers) - 1:
                # Nothing reads the other tokens' hidden states after the last keys and values are written.
                hidden, attended = hidden[: plan.num_logits], attended[: plan.num_logits]
            hidden = hidden + layer.self_attn.o_proj(attended)
            gate, up = F.linear(self._norm(layer.post_attention_layernorm, hidden), *self._gate_up[i]).chunk(2, dim=-1)
            hidden = hidden + layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)
        return self._model.lm_head(self._norm(self._trunk.norm, hidden))


class AttentionInterfaceForward:
    """Any decoder-only model that calls transformers' attention interface: its own code with this module's
    attention."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        transformers.AttentionInterface.register(ATTENTION_NAME, _slots_attention)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def held(self) -> list[torch.Tensor]:
        return []

    def __call__(self, cache: KVCache, plan: ForwardPlan) -> torch.Tensor:
        kept = {}
        if self._keeps_logits:
            kept["logits_to_keep"] = torch.arange(plan.num_logits, device=plan.input_ids.device)
        output = self._model(
            input_ids=plan.input_ids[None],
            position_ids=plan.positions[None],
            use_cache=False,
            slots_cache=cache,
            slots_plan=plan,
            **kept,
        )
        return output.logits[0, : plan.num_logits]


def _slots_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    slots_cache: KVCache,
    slots_plan: ForwardPlan,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv]

    Masks and windows are in the cache, which knows each layer's.
    """
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attended = slots_cache.attend(module.layer_idx, q, k, v, scoring, slots_plan)
    return attended.view(1, *q.shape[:2], v.shape[2]), None
