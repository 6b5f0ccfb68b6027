"""Records the calls of torch.distributed on each rank, and checks that NCCL could carry them out.

gloo, over which the tests run, pairs sends with receives of any order and gives each call its own thread. NCCL runs the
calls of one group in order, and a call is complete when all of its ranks have come to it: calls in another order on one
rank wait for each other for ever. The checks therefore look at what was called, and not at what came back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

QUIET = ("wait_tensor", "_wrap_tensor_autograd")  # of the functional collectives: they are no calls of their own


@dataclass(frozen=True)
class Call:
    """One call of one rank. ``what``: its tensors and root, equal on all ranks. ``peer``: whom it sends to or receives
    from, as a rank of the group. ``sizes``: of an all-to-all, what this rank (gets from, gives to) each. ``batch``:
    calls of one batch have the same number; 0: a call alone. ``lane``: the thread that made it."""

    group: str
    name: str
    what: str = ""
    peer: int | None = None
    sizes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    batch: int = 0
    lane: str = ""

    @property
    def sends(self) -> bool:
        return self.name == "send"

    def __str__(self) -> str:
        return f"{self.name}({self.what}) in group {self.group}" + ("" if self.peer is None else f" with {self.peer}")


@dataclass
class Log:
    """Of one rank: its calls in order, and the ranks of each group."""

    calls: list[Call] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Within this context the calls of this thread go into ``log``, those from C++ (DistributedDataParallel) and of
    DTensors among them."""

    def __init__(self, log: Log, lane: str = "") -> None:
        super().__init__()
        self.log, self.lane = log, lane
        self._batch = self._batches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name not in QUIET:
            self._note(name.strip("_"), args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @contextmanager
    def batching(self) -> Iterator[None]:
        """Within this context calls belong to one batch."""
        self._batches += 1
        self._batch = self._batches
        try:
            yield
        finally:
            self._batch = 0

    def _note(self, name: str, args: Sequence[Any], words: Mapping[str, Any]) -> None:
        given = [*args, *words.values()]
        group = next(found for found in map(_group_of, reversed(given)) if found is not None)
        self.log.groups[group.group_name] = dist.get_process_group_ranks(group)
        tensors = str([found for value in given if (found := _described(value))])
        call: dict[str, Any] = {"batch": self._batch, "lane": self.lane, "what": tensors}
        if name in ("send", "recv"):
            call |= {"peer": given[2], "what": f"{given[0][0].numel()} {given[0][0].dtype}"}
        elif "alltoall" in name or "all_to_all" in name:
            lists = [tuple(x) for x in given if isinstance(x, list) and not any(isinstance(y, torch.Tensor) for y in x)]
            if lists[0]:  # else all get and give the same
                call |= {"what": "", "sizes": (lists[0], lists[1])}
        else:
            call["what"] += f" {[x for x in given if isinstance(x, (int, str)) and not isinstance(x, bool)]}"
        self.log.calls.append(Call(group.group_name, name, **call))


def _group_of(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return torch._C._distributed_c10d._resolve_process_group(value)
        except (RuntimeError, LookupError):
            return None
    try:
        return dist.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else None
    except RuntimeError:  # a reduction
        return None


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return [_described(x) for x in value if isinstance(x, (torch.Tensor, list))] if isinstance(value, list) else None


@contextmanager
def recorded(lane: str = "") -> Iterator[Log]:
    """The calls of this thread within this context."""
    recorder, original = Recorder(Log(), lane), dist.batch_isend_irecv

    def batch(operations: Any) -> Any:
        with recorder.batching():
            return original(operations)

    dist.batch_isend_irecv = batch
    try:
        with recorder:
            yield recorder.log
    finally:
        dist.batch_isend_irecv = original


Node = tuple[Any, ...]


def faults(logs: Sequence[Log]) -> list[str]:
    """What NCCL would not survive, a sentence each; ``logs`` of all ranks in order."""
    groups = {name: ranks for log in logs for name, ranks in log.groups.items()}
    found: list[str] = []
    for name, ranks in groups.items():
        calls = {rank: [call for call in logs[rank].calls if call.group == name] for rank in ranks}
        found += [*_collectives(ranks, calls), *_pairs(ranks, calls), *_first(ranks, calls)]
    return found or _circles(logs, groups)


def _collectives(ranks: Sequence[int], calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    together = {rank: [call for call in calls[rank] if call.peer is None] for rank in ranks}
    first = together[ranks[0]]
    for rank in ranks[1:]:
        own = together[rank]
        for place in range(max(len(first), len(own))):
            a, b = (str(x[place]) if place < len(x) else "nothing" for x in (first, own))
            if a != b:
                yield f"Collective {place}: rank {ranks[0]} calls {a}, rank {rank} calls {b}."
                break
    for turn in zip(*together.values(), strict=False):
        if turn[0].sizes:
            gets, gives = ([call.sizes[side] for call in turn if call.sizes] for side in (0, 1))
            if [*map(tuple, zip(*gives, strict=True))] != gets:
                yield f"{turn[0]}: the ranks give {gives}, and get {gets}."


def _pairs(ranks: Sequence[int], calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """What two ranks of a group send each other must have one order on both: NCCL gives the pair one queue."""
    for a in range(len(ranks)):
        for b in range(a + 1, len(ranks)):
            mine, theirs = (
                [(call.sends == own, call.what, call.batch > 0) for call in calls[ranks[x]] if call.peer == y]
                for x, y, own in ((a, b, True), (b, a, False))
            )
            if not any(batched for *_, batched in mine + theirs):
                if mine != theirs:
                    at = next((i for i, (x, y) in enumerate(zip(mine, theirs, strict=False)) if x != y), "the last")
                    yield f"Between ranks {ranks[a]} and {ranks[b]} call {at} of one is not that of the other."
                continue
            for forth in (True, False):  # within a batch the directions have no order
                if [x for x in mine if x[0] == forth] != [x for x in theirs if x[0] == forth]:
                    yield f"Between ranks {ranks[a]} and {ranks[b]} batches differ."


def _first(ranks: Sequence[int], calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """torch: the communicator forms at a group's first collective or batch, which all of its ranks must call."""
    if any(call.batch for own in calls.values() for call in own):
        firsts = {rank: own[0].batch > 0 if own else None for rank, own in calls.items()}
        if len(set(firsts.values())) > 1:
            yield f"A batch is the first call of a group in which not all of the ranks {list(ranks)} take part in it."


def _circles(logs: Sequence[Log], groups: Mapping[str, Sequence[int]]) -> list[str]:
    """Each call begins after those before it in its group and, but for sends, those before it in its thread; sends are
    waited for before the next collective."""
    before: dict[Node, set[Node]] = defaultdict(set)
    for rank, log in enumerate(logs):
        counts: dict[Node, int] = defaultdict(int)
        last: dict[Any, set[Node]] = defaultdict(set)  # of a thread, and of a group
        sent: dict[str, set[Node]] = defaultdict(set)
        batch: tuple[str, int] = "", 0
        open_: set[Node] = set()  # of the present batch
        for call in log.calls:
            here = groups[call.group].index(rank)
            ends = () if call.peer is None else (here, call.peer) if call.sends else (call.peer, here)
            key: Node = call.group, *ends
            node: Node = (*key, counts[key])
            counts[key] += 1
            if not call.batch or (call.lane, call.batch) != batch:
                open_ = set()
                waited = last["thread", call.lane] | last["group", call.group]
            batch = call.lane, call.batch
            before[node] |= waited - {node}
            if call.peer is None:
                before[node] |= sent.pop(call.lane, set())
            open_.add(node)
            last["group", call.group] = set(open_)
            if call.sends and not call.batch:
                sent[call.lane].add(node)
            else:
                last["thread", call.lane] = set(open_)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return [f"These calls wait for each other: {error.args[1]}."]
    return []


def changed(logs: Sequence[Log], rank: int, change: Callable[[list[Call]], list[Call]]) -> list[Log]:
    """The logs with other calls on one rank."""
    return [Log(change([*log.calls]) if at == rank else log.calls, log.groups) for at, log in enumerate(logs)]
