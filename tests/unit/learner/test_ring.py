"""Ring attention: whatever the ranks and the sequences, what one rank would find, in each of the kernels."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from asyncrlhf.learner.attention import ring
from asyncrlhf.learner.attention.attention import PackedLayout
from asyncrlhf.learner.attention.ring import RingPlan, plan_ring
from asyncrlhf.learner.attention.tiles import Scoring
from asyncrlhf.learner.attention.varlen import varlen_takes
from asyncrlhf.learner.ranks import Peers
from tests.numeric import assert_close
from tests.unit.learner.test_varlen import (
    SHAPES,
    SIZE,
    Layouts,
    alone,
    one_at_a_time,
    outcome,
    siblings,
    sinks,
    tensors,
)

SCALE = SIZE**-0.5
WORLDS: dict[str, Layouts] = {
    **SHAPES,
    "one long": alone(np.array([301])),
    "two tokens": alone(np.array([2])),
    "log-normal": alone(np.random.default_rng(0).lognormal(3.0, 1.0, 12).astype(np.int64) + 1),
    "many short": alone(np.full(30, 3)),
    "a prompt over all ranks": siblings(1, 120, 9, seed=5),
}
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Threads:
    """Ranks as threads of this process, which hand each other tensors instead of sending them."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._boxes: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(ranks)]
        self._ranks = ranks
        monkeypatch.setattr(ring, "_pass_on", self._pass_on)

    def _pass_on(self, tensor: torch.Tensor, tokens: int, peers: Peers) -> Any:
        self._boxes[(peers.rank + 1) % peers.ranks].put(tensor)

        class Arriving:
            def get(_) -> torch.Tensor:
                came = self._boxes[peers.rank].get(timeout=60)
                assert came.shape[1] == tokens
                return came

        return Arriving()

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self._ranks) as pool:
            return list(pool.map(job, range(self._ranks)))


def plans(layout: PackedLayout, ranks: int) -> list[RingPlan]:
    positions = layout.position_ids[0].numpy()
    return [plan_ring(layout.spans.numpy(), positions, rank, ranks) for rank in range(ranks)]


def on_ranks(
    layout: PackedLayout, given: list[torch.Tensor], ranks: int, threads: Threads, **options: Any
) -> dict[str, torch.Tensor]:
    """Output and gradients of all ranks, put together; of sinks, the sum over the ranks."""
    chosen = plans(layout, ranks)

    def job(rank: int) -> dict[str, torch.Tensor]:
        plan, peers = chosen[rank], Peers(rank, ranks)
        q, k, v = (x.detach()[:, :, plan.rows].requires_grad_() for x in given[:3])

        def attend(q: Any, k: Any, v: Any, sinks: Any = None) -> torch.Tensor:
            return ring.ring_attention(q, k, v, plan, peers, Scoring(SCALE, sinks=sinks, **options))

        return outcome(attend, q, k, v, given[3][:, plan.rows], *given[4:])

    found = threads.run(job)
    whole = {}
    for name, sample in (("out", given[3]), ("q", given[0]), ("k", given[1]), ("v", given[2])):
        along = 1 if name == "out" else 2
        rows = torch.from_numpy(np.concatenate([plan.rows for plan in chosen]))
        parts = torch.cat([part[name] for part in found], along)
        whole[name] = torch.zeros_like(sample, dtype=parts.dtype).index_copy(along, rows, parts)
    if len(given) > 4:
        whole["sinks"] = torch.stack([part["sinks"] for part in found]).sum(0)
    return whole


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_output_and_gradients_are_those_of_one_rank(world: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PackedLayout.build(*WORLDS[world])
    given = tensors(layout.position_ids.shape[1])
    found = on_ranks(layout, given, ranks, Threads(ranks, monkeypatch))
    assert_close(found, outcome(lambda *qkv: one_at_a_time(layout, *qkv), *given), atol=1e-9)


@pytest.mark.parametrize("world", ["log-normal", "long prompts"])
def test_scores_beyond_the_range_of_an_exponential(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-sum-exps of thousands, as a model that is sure of itself may have them."""
    layout = PackedLayout.build(*WORLDS[world])
    q, *others = tensors(layout.position_ids.shape[1])
    given = [(q.detach() * 2000).requires_grad_(), *others]
    found = on_ranks(layout, given, 2, Threads(2, monkeypatch))
    assert_close(found, outcome(lambda *qkv: one_at_a_time(layout, *qkv), *given), atol=1e-6)


@pytest.mark.parametrize("window", [1, 7, None])
@pytest.mark.parametrize("world", ["long prompts", "long and short", "two tokens"])
def test_written_out_it_takes_sliding_windows(world: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_FlashCalls", ring._Written)
    layout = PackedLayout.build(*WORLDS[world])
    given = tensors(layout.position_ids.shape[1])
    found = on_ranks(layout, given, 4, Threads(4, monkeypatch), window=window)
    assert_close(found, outcome(lambda *qkv: one_at_a_time(layout, *qkv, window=window), *given), atol=1e-9)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("world", ["long prompts", "short siblings", "two tokens"])
def test_windows_caps_and_sinks(
    world: str, window: int | None, softcap: float | None, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PackedLayout.build(*WORLDS[world])
    given = tensors(layout.position_ids.shape[1])
    given += [sinks()] if sunk else []
    options = {"window": window, "softcap": softcap}
    found = on_ranks(layout, given, 3, Threads(3, monkeypatch), **options)
    assert_close(found, outcome(partial(one_at_a_time, layout, **options), *given), atol=1e-9)


def test_what_is_written_out_is_so_in_float32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PackedLayout.build(*WORLDS["long prompts"])
    q, k, v = (x.detach().float() for x in tensors(layout.position_ids.shape[1])[:3])
    plan = plans(layout, 1)[0]
    Threads(1, monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        found = ring.ring_attention(q, k, v, plan, Peers(0, 1), Scoring(SCALE, 7))
    expected = one_at_a_time(layout, q.double(), k.double(), v.double(), window=7)
    assert_close(found.double(), expected, atol=1e-5)  # bfloat16 scores are off by 1e-2


def by_hand(q: Any, k: Any, v: Any, bounds: tuple[Any, ...], causal: bool, scale: float) -> list[tuple[Any, ...]]:
    """(rows of queries, of keys, scores, keys, values) of each run of a varlen call; heads come second."""
    (cu_q, cu_k, max_q, max_k), group = bounds, q.shape[1] // k.shape[1]
    assert (max_q, max_k) == (
        int(cu_q.diff().max()),
        int(cu_k.diff().max()),
    ) and cu_q.dtype == cu_k.dtype == torch.int32
    runs = []
    for first, end, key, last in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        mine, theirs = slice(int(first), int(end)), slice(int(key), int(last))
        keys, values = (x[theirs].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q[mine].transpose(0, 1) @ keys.transpose(1, 2) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        runs.append((mine, theirs, scores, keys, values))
    return runs


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("world", ["short siblings", "long prompts", "log-normal", "two tokens"])
def test_torchs_varlen_kernel_is_asked_for_the_same(
    world: str, takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its documentation says what it computes: the kernel itself runs on GPUs alone. Before torch 2.12 it does not
    take fewer heads of keys than of queries."""

    def forward(q: Any, k: Any, v: Any, *bounds: Any, return_aux: Any, scale: float, window_size: Any) -> Any:
        assert return_aux.lse and (q.shape[1] > k.shape[1]) == takes_groups
        out, lse = torch.empty_like(q), q.new_empty((q.shape[1], len(q)))
        for mine, _, scores, _, values in by_hand(q, k, v, bounds, window_size == (-1, 0), scale):
            out[mine], lse[:, mine] = (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1)
        return out, lse

    def grouped(*given: Any, enable_gqa: bool, **more: Any) -> Any:
        assert enable_gqa
        return forward(*given, **more)

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *more: Any) -> Any:
        *bounds, causal, _, scale, window = more
        assert window == ([-1, 0] if causal else [-1, -1])
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for mine, theirs, scores, keys, values in by_hand(q, k, v, tuple(bounds), causal, scale):
            grad = dout[mine].transpose(0, 1)
            weights = (scores - lse[:, mine, None]).exp()
            inner = grad @ values.transpose(1, 2) - (grad * out[mine].transpose(0, 1)).sum(-1, keepdim=True)
            slopes, shape = weights * inner * scale, (k.shape[1], -1)
            dq[mine] += (slopes @ keys).transpose(0, 1)
            found = slopes.transpose(1, 2) @ q[mine].transpose(0, 1), weights.transpose(1, 2) @ grad
            for target, gradient in zip((dk, dv), found, strict=True):
                target[theirs] += gradient.unflatten(0, shape).sum(1).transpose(0, 1)
        return dq, dk, dv

    monkeypatch.setattr(ring, "_FlashCalls", ring._Varlen)
    monkeypatch.setattr(varlen, "varlen_attn", grouped if takes_groups else forward)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    layout = PackedLayout.build(*WORLDS[world])
    given = tensors(layout.position_ids.shape[1])
    found = on_ranks(layout, given, 2, Threads(2, monkeypatch))
    assert_close(found, outcome(lambda *qkv: one_at_a_time(layout, *qkv), *given), atol=1e-5)


@pytest.mark.parametrize("world", ["long prompts", "log-normal"])
def test_half_precision_is_as_near_as_it_can_be(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PackedLayout.build(*WORLDS[world])
    given = [x.detach().bfloat16().requires_grad_() for x in tensors(layout.position_ids.shape[1])]
    found = on_ranks(layout, given, 4, Threads(4, monkeypatch))
    exact = [x.detach().double().requires_grad_() for x in given]
    assert {x.dtype for x in found.values()} == {torch.bfloat16}
    rounded = {name: x.double() for name, x in found.items()}
    assert_close(rounded, outcome(lambda *qkv: one_at_a_time(layout, *qkv), *exact), atol=0.1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("world", ["one long", "many short", "log-normal"])
def test_each_rank_has_as_much_to_do(world: str, ranks: int) -> None:
    """Tokens, and pairs of query and key, of the rank that has the most, by the mean."""
    layout = PackedLayout.build(*WORLDS[world])
    found = plans(layout, ranks)
    tokens = [len(plan.rows) for plan in found]
    assert sorted(np.concatenate([plan.rows for plan in found])) == [*range(layout.position_ids.shape[1])]
    assert max(tokens) - min(tokens) <= 2
    if world == "one long":
        pairs = [int((torch.from_numpy(plan.rows) + 1).sum()) for plan in found]
        assert max(pairs) <= 1.02 * np.mean(pairs)


@pytest.mark.parametrize(
    ("size", "values", "dtype", "kernel"),
    [
        (64, 64, torch.bfloat16, ring._Varlen),
        (256, 256, torch.float16, ring._Varlen),
        (20, 20, torch.bfloat16, ring._Written),  # no multiple of 8
        (264, 264, torch.bfloat16, ring._Written),
        (192, 128, torch.bfloat16, ring._Written),
        (64, 64, torch.float32, ring._Written),
    ],
)
def test_a_gpu_gets_the_kernel_that_takes_its_heads(size: int, values: int, dtype: torch.dtype, kernel: type) -> None:
    """``meta`` stands for a device that is no CPU."""
    plan = plans(PackedLayout.build(*SHAPES["short siblings"]), 2)[0]
    query, value = (torch.empty(1, 2, 8, width, dtype=dtype, device="meta") for width in (size, values))
    assert type(ring._kernel(plan, query, value, Scoring(1.0))) is kernel
    assert varlen_takes(query, value) == (kernel is ring._Varlen)
