"""Attention without padding: exact, and no more work than the sequences ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from asyncrlhf.data.packing import microbatch_indices
from asyncrlhf.learner.attention import varlen as learner_varlen
from asyncrlhf.learner.attention.attention import PackedLayout, packed_attention
from asyncrlhf.learner.attention.varlen import (
    attention_op,
    efficient_kernel,
    efficient_takes,
    grouped_heads,
    masked_calls,
    varlen_kernel,
    varlen_takes,
)
from tests.numeric import assert_close

Layouts = tuple[np.ndarray, np.ndarray, np.ndarray]  # lengths, prompts, owners
SIZE = 16


def siblings(groups: int, prompt: int, longest: int, seed: int = 0) -> Layouts:
    """Groups of one to five siblings whose answers have up to ``longest`` tokens; some have none of their own."""
    draws = np.random.default_rng(seed)
    counts = draws.integers(1, 6, groups)
    owners = np.repeat(np.cumsum(counts) - counts, counts)
    prompts = np.repeat(draws.integers(1, prompt + 1, groups), counts)
    return prompts + draws.integers(0, longest + 1, len(owners)), prompts, owners


def alone(lengths: np.ndarray) -> Layouts:
    return lengths, np.minimum(lengths, 1), np.arange(len(lengths))


SHAPES = {
    "short siblings": siblings(6, 9, 20),
    "long prompts": siblings(3, 90, 60, seed=1),
    "long and short": alone(np.array([3, 200, 130, 1, 40, 38, 129, 2])),
    "one token": alone(np.array([1])),
}


def rows_of(layout: PackedLayout) -> Iterator[tuple[list[int], list[int]]]:
    """The packed rows that are each sequence's queries, and those that are its keys."""
    for first, own, prompt, shared in layout.spans.tolist():
        mine = [*range(first, first + own)]
        yield mine, [*range(prompt, prompt + shared), *mine]


def one_at_a_time(
    layout: PackedLayout,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax attention, written out, of one sequence after the other."""
    parts = []
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for mine, seen in rows_of(layout):
        scores = q[0][:, mine] @ k[0][:, seen].transpose(1, 2) * SIZE**-0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        distance = torch.arange(len(seen) - len(mine), len(seen))[:, None] - torch.arange(len(seen))
        hidden = (distance < 0) | (distance >= (window or len(seen)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(mine), 1)], -1)
        weights = scores.softmax(-1)[..., : len(seen)]
        parts.append((weights @ v[0][:, seen]).transpose(0, 1))
    return torch.cat(parts)[None]


def tensors(tokens: int, heads: tuple[int, int] = (6, 2), dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """query, key, value and a direction for the gradient, laid out as transformers does."""
    draws = torch.Generator().manual_seed(tokens)
    shapes = [(1, tokens, count, SIZE) for count in (heads[0], heads[1], heads[1])]
    made = [torch.randn(s, generator=draws, dtype=dtype).transpose(1, 2).requires_grad_() for s in shapes]
    return [*made, torch.randn((1, tokens, heads[0], SIZE), generator=draws, dtype=dtype)]


def sinks(heads: int = 6) -> torch.Tensor:
    return torch.linspace(-2, 3, heads, dtype=torch.float64).requires_grad_()


def outcome(
    attend: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, direction: Any, sinks: Any = None
) -> dict[str, torch.Tensor]:
    """The output and the gradients of ``attend(q, k, v, sinks)``, without sinks if they are None."""
    given = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    out = attend(*given.values())
    gradients = torch.autograd.grad((out * direction).sum(), [*given.values()])
    return {"out": out.detach(), **dict(zip(given, gradients, strict=True))}


def packed(layout: PackedLayout, **options: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: packed_attention(torch.nn.Identity(), q, k, v, None, packed_layout=layout, **options)[0]


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_one_sequence_at_a_time(shape: str, heads: tuple[int, int]) -> None:
    layout = PackedLayout.build(*SHAPES[shape])
    given = tensors(layout.position_ids.shape[1], heads)
    found = outcome(packed(layout), *given)
    assert_close(found, outcome(lambda *qkv: one_at_a_time(layout, *qkv), *given), atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_is_as_near_as_it_can_be(shape: str) -> None:
    layout = PackedLayout.build(*SHAPES[shape])
    given = [x.detach().bfloat16().requires_grad_() for x in tensors(layout.position_ids.shape[1])]
    found = outcome(packed(layout), *given)
    exact = [x.detach().double().requires_grad_() for x in given]
    assert {x.dtype for x in found.values()} == {torch.bfloat16}
    rounded = {name: x.double() for name, x in found.items()}
    assert_close(rounded, outcome(lambda *qkv: one_at_a_time(layout, *qkv), *exact), atol=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sliding_window_hides_what_lies_behind_it(shape: str) -> None:
    layout = PackedLayout.build(*SHAPES[shape])
    given = tensors(layout.position_ids.shape[1])
    found = outcome(packed(layout, sliding_window=7), *given)
    assert_close(found, outcome(lambda *qkv: one_at_a_time(layout, *qkv, window=7), *given), atol=1e-9)


def before_2_12(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
                return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1)) -> torch.Tensor:  # fmt: skip
    """``varlen_attn`` as its documentation says what it computes: the kernel itself runs on GPUs alone."""
    queries, keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(queries), max(keys)) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert q.shape[1] == k.shape[1] == v.shape[1]
    left, right = window_size
    assert right == 0
    whole = (x.transpose(0, 1)[None] for x in (q, k, v))
    return masked_calls(*whole, (queries, keys), scale, None if left < 0 else left + 1)[0]


def since_2_12(q: Any, k: Any, v: Any, *bounds: Any, scale: Any = None, window_size: Any = (-1, -1),
               enable_gqa: bool = False) -> torch.Tensor:  # fmt: skip
    assert enable_gqa
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return before_2_12(q, k, v, *bounds, scale=scale, window_size=window_size)


@pytest.mark.parametrize("kernel", [before_2_12, since_2_12])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_varlen_kernel_is_asked_for_the_same(
    shape: str, window: int | None, kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PackedLayout.build(*SHAPES[shape])
    monkeypatch.setattr(varlen, "varlen_attn", kernel)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = (x if layout.key_rows is None else x.index_select(2, layout.key_rows) for x in (k, v))
        return varlen_kernel(q, *keys, (*layout.bounds, *layout.most), SIZE**-0.5, window)

    given = tensors(layout.position_ids.shape[1])
    found = outcome(attend, *given)
    assert_close(found, outcome(lambda *qkv: one_at_a_time(layout, *qkv, window=window), *given), atol=1e-9)


@pytest.mark.filterwarnings("error")  # the compiler warns of a cache that it looks through
@pytest.mark.parametrize("kernel", [before_2_12, since_2_12])
def test_the_compiler_takes_the_kernels_arguments_as_constants(
    kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    torch._dynamo.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    compiled = torch.compile(grouped_heads, backend="eager", fullgraph=True)
    query, key = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    keys, _, more = compiled(query, key, key)
    assert (keys.shape[1], more) == ((2, {"enable_gqa": True}) if kernel is since_2_12 else (4, {}))


def cutlass(q: Any, k: Any, v: Any, bias: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, dropout: float,
            mask: int, keeps_sums: bool, *, scale: float, window_size: int | None) -> tuple[torch.Tensor]:  # fmt: skip
    """``_efficient_attention_forward`` as torch's sources say what it computes: the kernel runs on GPUs alone."""
    queries, keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(queries), max(keys)) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert bias is None and not dropout and mask == 2 and keeps_sums
    assert q.shape[2] == k.shape[2] == v.shape[2] and all(x.shape[3] % 8 == 0 for x in (q, k, v))
    whole = (x.transpose(1, 2) for x in (q, k, v))
    return (masked_calls(*whole, (queries, keys), scale, window_size),)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_memory_efficient_kernel_is_asked_for_the_same(
    shape: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PackedLayout.build(*SHAPES[shape])
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", cutlass)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = (x if layout.key_rows is None else x.index_select(2, layout.key_rows) for x in (k, v))
        return efficient_kernel(q, *keys, (*layout.bounds, *layout.most), SIZE**-0.5, window)

    given = tensors(layout.position_ids.shape[1])
    found = outcome(attend, *given)
    assert_close(found, outcome(lambda *qkv: one_at_a_time(layout, *qkv, window=window), *given), atol=1e-9)


@pytest.mark.parametrize("sizes", [(64, 64), (20, 20), (192, 128)], ids=["usual", "not of 16 bytes", "values narrower"])
@pytest.mark.parametrize("window", [None, 7])
def test_the_installed_torch_takes_float32_and_any_head(window: int | None, sizes: tuple[int, int]) -> None:
    """As below, for the kernel of what the varlen kernel excludes."""
    query, key, value = (
        torch.empty(1, heads, 8, size, device="meta", requires_grad=True)
        for heads, size in ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))
    )
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    assert efficient_takes(value) and not varlen_takes(query, value)
    assert efficient_kernel(query, key, value, (ends, ends, 5, 5), 0.1, window).shape == (1, 8, 4, sizes[1])
    assert not efficient_takes(value.double())


@pytest.mark.parametrize("window", [None, 7])
def test_the_installed_torch_takes_the_call(window: int | None) -> None:
    """``meta`` stands for a GPU: torch checks the arguments, and computes nothing."""
    query, key = (torch.empty(1, heads, 8, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    assert varlen_takes(query, key)
    assert varlen_kernel(query, key, key, (ends, ends, 5, 5), 0.1, window).shape == (1, 8, 4, 64)


def test_the_operator_is_one_that_torch_compile_takes_whole() -> None:
    layout = PackedLayout.build(*SHAPES["short siblings"])
    q, k, v, _ = tensors(layout.position_ids.shape[1])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attention_op, (q, k, v, layout.spans, 0.25), test_utils=checks)


class Work:
    """Counts rows and pairs of query and key over all calls of torch's flash kernel, forward and backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = self.pairs = 0.0
        for name, place in (("flash_op", 0), ("flash_op_backward", 1)):
            monkeypatch.setattr(learner_varlen, name, partial(self._counted, getattr(learner_varlen, name), place))

    def _counted(self, kernel: Callable[..., Any], place: int, *tensors: Any, **options: Any) -> Any:
        (count, _, rows, _), keys, causal = tensors[place].shape, tensors[place + 1].shape[2], tensors[-1]
        self.rows += count * rows * causal
        self.pairs += count * (rows * (rows + 1) / 2 if causal else rows * keys)
        return kernel(*tensors, **options)


def lognormal(draws: np.random.Generator, count: int) -> np.ndarray:
    spread = np.log(2.0)  # mean 300, coefficient of variation 1
    return np.exp(draws.normal(np.log(300) - spread / 2, spread**0.5, count)).clip(8, 1024).astype(np.int64)


LAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "constant": lambda draws, count: np.full(count, 512),
    "log-normal": lognormal,
    "one in ten is long": lambda draws, count: np.where(draws.random(count) < 0.1, 1024, 64),
}


@pytest.mark.parametrize("shared", [0, 40])
@pytest.mark.parametrize("law", LAWS)
def test_no_more_rows_and_pairs_than_the_sequences_ask_for(
    law: str, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward; ``shared``: siblings of four share a prompt of so many tokens."""
    lengths = LAWS[law](np.random.default_rng(0), 64) + shared
    budget = 4096
    for part in microbatch_indices(lengths, budget)[:4]:
        _, first, group = np.unique(part // (4 if shared else 1), return_index=True, return_inverse=True)
        layout = PackedLayout.build(lengths[part], np.full(len(part), shared or 1), first[group])
        tokens = layout.position_ids.shape[1]
        q, k, v, direction = (x.detach()[..., :1].contiguous().requires_grad_() for x in tensors(tokens, (1, 1)))
        with monkeypatch.context() as patched:
            work = Work(patched)
            outcome(packed(layout), q, k, v, direction)
        assert tokens <= work.rows / 2 <= min(1.05 * tokens, 1.05 * budget)
        pairs = float((layout.position_ids + 1).sum())
        assert pairs <= work.pairs / 2 <= 1.1 * pairs
