"""Decode iterations of the hf engine as CUDA graphs: one launch in place of hundreds that a GPU would wait for."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from asyncrlhf.engines.hf.kv_cache import ForwardPlan, KVCache
from asyncrlhf.engines.hf.layer_group import GroupPlan
from asyncrlhf.engines.hf.slots import SlotTable
from asyncrlhf.models.copies import to_device

SIGHTINGS = 3  # of a shape before it is captured: rare shapes are not worth it
SHORTEST = 64  # places that a graph attends to at least
# Largest difference of a replay's logits from the same pass without a graph, relative to the distance between the
# largest and the smallest logit. The kernels are the same, so that only another choice of them could round otherwise.
EXACT, COARSE = 5e-4, 0.02
Pass = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class _Graph:
    given: torch.Tensor  # [3, N] int64: a token of each row, its position, and the row of the cache that gets its key
    replay: Callable[[], None]
    logits: torch.Tensor  # [N, V], which the next replay of any graph may overwrite
    held: list[torch.Tensor]  # read by the graph, and perhaps by nothing else any more


class DecodeGraphs:
    """Graphs of decode iterations without prefills, by the number of rows and of attended places, both rounded up.

    Rows that only fill a graph up write into a spare row of the cache, behind its slots. A graph knows addresses:
    after a growth of the cache, and after the weights moved, :meth:`drop` must be called; new values in the same place
    are fine. A model whose pass cannot be captured, since the host waits in it, or whose replay gives other logits, is
    passed without graphs from then on, and a warning says so once.
    """

    def __init__(
        self,
        cache: KVCache,
        forward: Callable[[KVCache, ForwardPlan], torch.Tensor],
        held: Callable[[], list[torch.Tensor]],
        slots: int,
    ) -> None:
        """``forward`` over ``cache``, whose groups have a spare row ``slots``. ``held``: tensors that a pass reads, and
        that a later one may replace."""
        self._cache, self._forward, self._held, self._slots = cache, forward, held, slots
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._seen: Counter[tuple[int, int]] = Counter()
        self._capture = cuda_capture()
        self.reason = ""  # why there are none any more

    def __len__(self) -> int:
        return len(self._graphs)

    def drop(self) -> None:
        self._graphs.clear()
        self._seen.clear()
        self._capture = cuda_capture()  # whose memory goes with the old graphs

    def step(self, table: SlotTable) -> torch.Tensor | None:
        """The logits [table.count, V] of a decode iteration of rows that are all ready; None: no graph of its shape."""
        n, last = table.count, table.length[: table.count] - 1
        shape = rounded_rows(n, self._slots), rounded_places(int(last.max()) + 1, self._cache.capacity)
        graph = self._graphs.get(shape)
        if graph is None:
            self._seen[shape] += 1
            if self.reason or self._seen[shape] < SIGHTINGS:
                return None
        given = np.zeros((3, shape[0]), np.int64)
        given[0, :n], given[1, :n] = table.tokens[np.arange(n), last], last
        given[2, :n], given[2, n:] = np.arange(n), self._slots
        sent = to_device(torch.from_numpy(given), self._cache.device)
        if graph is None:
            graph = self._captured(sent, shape)
            if graph is None:
                return None
            self._graphs[shape] = graph
        else:
            graph.given.copy_(sent)
        graph.replay()
        return graph.logits[:n]

    def _captured(self, given: torch.Tensor, shape: tuple[int, int]) -> _Graph | None:
        def run() -> torch.Tensor:
            return self._pass(given, shape[1])

        plain = run().clone()  # what it builds at its first call, such as tables, is there from then on
        try:
            replay, logits = self._capture(run)
            replay()
        except RuntimeError as error:
            self._do_without(f"its pass cannot be captured ({str(error).strip().splitlines()[0]})")
            return None
        gap = (logits - plain).abs().max() / (plain.max() - plain.min())
        if not gap <= (EXACT if plain.dtype == torch.float32 else COARSE):
            self._do_without(f"the graph's logits differ by {float(gap):.1e} of their range")
            return None
        return _Graph(given, replay, logits, self._held())

    def _do_without(self, reason: str) -> None:
        self.drop()
        self.reason = reason
        warnings.warn(f"generator.engine=hf decodes this model without CUDA graphs: {reason}.", stacklevel=4)

    def _pass(self, given: torch.Tensor, attended: int) -> torch.Tensor:
        ids, positions, rows = given
        groups, biases = [], []
        for group in self._cache.groups:
            seen = min(attended, group.places)
            plan = GroupPlan(seen, None, rows, positions % group.places)
            groups.append(plan)
            biases.append(group.bias(group.newest(plan, positions), seen))
        n, longest = len(ids), self._cache.capacity - 1
        return self._forward(self._cache, ForwardPlan(ids, positions, n, n, longest, (), tuple(groups), tuple(biases)))


def rounded_rows(count: int, most: int) -> int:
    """Two sizes an octave: 1, 2, 3, 4, 6, 8, 12, ..., ``most``."""
    step = max(1, 1 << (count.bit_length() - 2)) if count > 2 else 1
    return min(-(-count // step) * step, most)


def rounded_places(count: int, most: int) -> int:
    """One size an octave."""
    return min(max(SHORTEST, 1 << (count - 1).bit_length()), most)


def cuda_capture() -> Callable[[Pass], tuple[Callable[[], None], torch.Tensor]]:
    """What captures a pass over fixed tensors: its replay, and the logits that this writes. All passes of one capturer
    share memory: only one of them may be replayed at a time."""
    pool = None

    def capture(run: Pass) -> tuple[Callable[[], None], torch.Tensor]:
        nonlocal pool
        pool = pool or torch.cuda.graph_pool_handle()
        present, side, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(present)
        with torch.cuda.stream(side):
            run()  # libraries prepare themselves for this stream
            torch.cuda.synchronize()
            # Other threads of this process, which receive weights, say, may do as they like meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                logits = run()
            finally:
                graph.capture_end()
        present.wait_stream(side)
        return graph.replay, logits

    return capture
