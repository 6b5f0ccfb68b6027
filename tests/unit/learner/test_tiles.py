"""Attention with soft caps, sinks and windows, tile by tile: exact, in memory that grows with the tokens."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.attention import tiles
from asyncrlhf.learner.attention.attention import PackedLayout, packed_attention
from asyncrlhf.learner.attention.tiles import Scoring, plan_tiles, tiled_attention
from tests.numeric import assert_close
from tests.unit.learner.test_varlen import SHAPES, alone, one_at_a_time, outcome, siblings, sinks, tensors

KINDS: dict[str, dict[str, Any]] = {
    "cap": {"softcap": 2.0},
    "cap and window": {"softcap": 2.0, "window": 7},
    "sinks": {},
    "sinks and window": {"window": 7},
    "all": {"softcap": 2.0, "window": 40},
}


def options_of(kind: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    return [sinks()] if "sinks" in kind or kind == "all" else [], KINDS[kind]


def attended(layout: PackedLayout, options: dict[str, Any]) -> Any:
    def attend(q: Any, k: Any, v: Any, s: Any = None) -> torch.Tensor:
        given = {"sliding_window": options.get("window"), "softcap": options.get("softcap"), "s_aux": s}
        return packed_attention(torch.nn.Identity(), q, k, v, None, packed_layout=layout, **given)[0]

    return attend


@pytest.mark.parametrize("sizes", ["one tile", "small tiles", "small tiles, recomputed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.more_but(every=4)
def test_output_and_gradients_are_those_of_one_sequence_at_a_time(
    shape: str, kind: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sizes != "one tile":
        for name, value in (("RUN", 32), ("SHORTEST_RUN", 5), ("TILE", 64), ("TILE_SCORES", 6 * 1000)):
            monkeypatch.setattr(tiles, name, value)
    monkeypatch.setattr(tiles, "KEPT_SCORES", 0 if "recomputed" in sizes else 2**40)
    tiles._tiles.cache_clear()
    layout = PackedLayout.build(*SHAPES[shape])
    more, options = options_of(kind)
    given = [*tensors(layout.position_ids.shape[1]), *more]
    found = outcome(attended(layout, options), *given)
    assert_close(found, outcome(partial(one_at_a_time, layout, **options), *given), atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 30, 200])
@pytest.mark.parametrize("most", [100, 10_000, 10**9])
def test_each_query_is_in_one_tile_with_its_keys_and_tiles_are_small(window: int | None, most: int) -> None:
    layout = PackedLayout.build(*siblings(9, 300, 400, seed=3))
    spans = layout.spans.numpy()
    plan = plan_tiles(spans, window, most)
    lengths = spans[:, 1] + spans[:, 3]
    pairs = sum(min(place + 1, window or place + 1) for place in layout.position_ids[0].tolist())
    assert plan.scores <= 1.25 * (pairs + layout.position_ids.shape[1] * tiles.RUN) + len(plan.parts) * tiles.TILE
    for part in plan.parts:
        area = len(part.runs) * part.queries * part.keys
        assert area <= most or (len(part.runs) == 1 and part.queries <= max(tiles.SHORTEST_RUN, most // part.keys))
        assert part.keys <= min(lengths.max(), (window or 10**9) + tiles.RUN)
    assert sorted(plan.order.tolist()) == [*range(layout.position_ids.shape[1])]


def kept_bytes(tokens: int, window: int | None) -> int:
    """What autograd keeps of one long sequence."""
    layout = PackedLayout.build(*alone(torch.tensor([tokens]).numpy()))
    q, k, v, _ = tensors(tokens, dtype=torch.float32)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = tiled_attention(q, k, v, layout.spans, Scoring(1.0, window, 2.0))
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("window", [None, 256])
def test_memory_grows_with_the_tokens(window: int | None) -> None:
    """Twice the tokens need twice the memory, and not the four times that scores would need."""
    short, long = (kept_bytes(tokens, window) for tokens in (1024, 2048))
    assert long <= 2.1 * short
    assert long < 6 * 2048 * 2048  # scores of six heads need four times as much


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_and_autocast_leave_the_softmax_alone(kind: str) -> None:
    layout = PackedLayout.build(*SHAPES["long prompts"])
    more, options = options_of(kind)
    exact = [x.detach().bfloat16().double() for x in tensors(layout.position_ids.shape[1])[:3]]
    wanted = one_at_a_time(layout, *exact, *more, **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = attended(layout, options)(*(x.float() for x in exact), *more)
    assert found.dtype == torch.float32
    assert_close(found.double(), wanted, atol=1e-5)  # bfloat16 scores are off by 1e-2
    assert_close(attended(layout, options)(*(x.bfloat16() for x in exact), *more), wanted.bfloat16(), rtol=0.01)


def test_a_view_can_be_taken_of_every_output() -> None:
    """As AFMoE does it."""
    layout = PackedLayout.build(*SHAPES["long prompts"])
    q, k, v, _ = tensors(layout.position_ids.shape[1])
    for window, softcap in itertools.product((None, 7), (None, 2.0)):
        attended(layout, {"window": window, "softcap": softcap})(q, k, v).view(1, q.shape[2], -1)


class Decoder(torch.nn.Identity):
    is_causal = True


class Encoder(torch.nn.Identity):
    is_causal = False


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias to its attention"),
        ({"indices": torch.zeros(1), "block_indices": None}, "passes indices to its attention"),
        ({"attention_mask": torch.ones(1)}, "passes attention_mask to its attention"),
        ({"is_causal": False}, "passes is_causal=False to its attention"),
        ({"module": Encoder()}, "Encoder passes is_causal=False to its attention"),
        ({"s_aux": torch.zeros(3)}, r"has 6 attention heads and attention sinks of shape \(3,\)"),
        ({"packed_layout": None}, "do not get the keyword arguments"),
    ],
)
def test_what_is_not_understood_is_refused(given: dict[str, Any], sentence: str) -> None:
    layout = PackedLayout.build(*SHAPES["one token"])
    q, k, v, _ = tensors(1)
    arguments = {"module": Decoder(), "attention_mask": None, "packed_layout": layout} | given
    with pytest.raises(ConfigError, match=sentence):
        packed_attention(query=q, key=k, value=v, **arguments)


def test_what_has_no_effect_is_not() -> None:
    layout = PackedLayout.build(*SHAPES["short siblings"])
    q, k, v, _ = tensors(layout.position_ids.shape[1])
    harmless = {"dropout": 0.1, "position_ids": layout.position_ids, "use_cache": False, "is_causal": True,
                "output_router_logits": True, "cache_position": torch.zeros(1), "position_bias": None}  # fmt: skip
    plain, _ = packed_attention(Decoder(), q, k, v, None, packed_layout=layout)
    for module in (Decoder(), Encoder()):  # what the call says counts
        found, _ = packed_attention(module, q, k, v, None, packed_layout=layout, **harmless)
        assert torch.equal(found, plain)
