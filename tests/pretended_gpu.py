"""A GPU that is pretended, to count what one learner step asks of it.

Tensors on it have shapes and types and no values: what the host reads from them is 0 (a single number: 1). Kernels that
only GPUs have count by what torch registers for shapes alone. torch's own fake tensors need a build with CUDA for this.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from asyncrlhf.learner import rank_models
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend

CARD = torch.device("cuda", 0)
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
ATTENTION = ("attention", "varlen")
# Operations whose result's shape depends on values: a GPU hands the count to the host, which waits for it.
COUNTING = {"aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::masked_select", "aten::unique_consecutive"}
WITHOUT_LAUNCH = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::_unsafe_view"}


def _efficient_backward(grad: Any, query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


# Shapes of kernels whose own registration for shapes does not take what autograd passes.
SHAPES = {"aten::_efficient_attention_backward": _efficient_backward}


class CardTensor(torch.Tensor):
    """A tensor of the pretended GPU; torch's own code takes it for one on ``meta``."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CardTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        made.inner = inner
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CARD)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the pretended GPU outside of its context")

    def __repr__(self, **kwargs: Any) -> str:
        return f"CardTensor({tuple(self.shape)}, {self.dtype})"


@dataclass
class Counts:
    """Of one device. Bytes are those of all arguments and results of every launch."""

    launches: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)  # by the place in the project that waits
    to_device: Counter[str] = field(default_factory=Counter)  # copies from the host, by place
    casts: int = 0  # launches that only change a float's type
    bytes: Counter[str] = field(default_factory=Counter)  # by matmul, attention, elementwise
    live: int = 0  # bytes that tensors hold
    peak: int = 0

    @property
    def launched(self) -> int:
        return sum(self.launches.values())

    @property
    def waits(self) -> int:
        return sum(self.syncs.values())


class _Devices(TorchFunctionMode):
    """Lets ``cuda`` mean ``meta`` for torch, before it looks for a driver."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **kwargs or {})
        if args and isinstance(args[0], CardTensor):
            if func is torch.Tensor.tolist:
                self._gpu.wait()
                return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
            if func in (torch.allclose, torch.equal):
                self._gpu.wait()
                return True
            if func is F.rms_norm and not torch.is_grad_enabled():
                made = torch.empty_like(args[0])  # of one kernel, which has no registration for shapes alone
                self._gpu.count("aten::_fused_rms_norm", [x for x in args if isinstance(x, torch.Tensor)], made)
                return made
            attends = func is F.scaled_dot_product_attention and not torch.is_grad_enabled()
            if attends and args[0].shape[1] == args[1].shape[1]:
                with self:
                    return _one_kernel(*args, **kwargs or {})
            if func is torch.Tensor.numpy:
                raise TypeError("can't convert a tensor of a GPU to numpy; use Tensor.cpu() first")
        if func is torch.Tensor.backward:
            ones = torch.ones_like(args[0])
            with self:  # for what the backward pass computes again; torch takes the mode off for its own function
                more = {"allow_unreachable": True, "accumulate_grad": True}
                return _engine_run_backward((args[0],), (ones,), False, False, (), **more)
        words = func in (torch.Tensor.to, torch.Tensor.cuda)
        args, kwargs = tree_map(lambda x: _meant(x, words), (args, kwargs or {}))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = _meant(kwargs["device"], True)
        return func(*args, **kwargs)


def _meant(x: Any, words: bool) -> Any:
    named = x.type == "cuda" if isinstance(x, torch.device) else words and isinstance(x, str) and x.startswith("cuda")
    return torch.device("meta") if named else x


class PretendedGpu(TorchDispatchMode):
    """Counts what runs on the device while the context lasts; see :func:`pretended_gpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self._storages: set[int] = set()

    def fresh(self) -> Counts:
        """Counts from 0, beside the tensors that live now."""
        live = self.counts.live
        self.counts = Counts(live=live, peak=live)
        return self.counts

    def wait(self) -> None:
        self.counts.syncs[_place()] += 1

    def moved(self, module: nn.Module) -> None:
        """``module`` from ``meta`` to the GPU, in place; what is tied stays tied."""
        made: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for name, own in part._parameters.items():
                if own is not None:
                    fresh = made.setdefault(id(own), nn.Parameter(self._wrapped(own.detach()), own.requires_grad))
                    part._parameters[name] = fresh
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else self._wrapped(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in given if isinstance(x, CardTensor)]
        target = kwargs.get("device")
        there = target is not None and torch.device(target).type == "meta"
        if not here and not there:
            return func(*args, **kwargs)
        if name in ("aten::_local_scalar_dense", "aten::item"):
            self.wait()
            return torch.ones((), dtype=here[0].dtype).item()
        if here and target is not None and not there:  # a copy to the host
            if not kwargs.get("non_blocking"):
                self.wait()
            return torch.zeros(here[0].shape, dtype=kwargs.get("dtype") or here[0].dtype)
        strangers = [x for x in given if not isinstance(x, CardTensor) and x.ndim and x.device.type != "meta"]
        if strangers and here and name != "aten::copy_":
            raise RuntimeError(f"{name}: tensors on two devices, at {_place()}")
        if strangers:
            self.counts.to_device[_place()] += 1
            if not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])):
                self.wait()  # for all that the device was asked before
        if self._asks_for_a_count(name, args):
            self.wait()
            found = tree_map(self._wrapped, _on_the_host(func, args, kwargs))
        else:
            inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
            try:
                found = tree_map(self._wrapped, SHAPES.get(name, func)(*inner_args, **inner_kwargs))
            except NotImplementedError:  # without a registration for shapes alone
                found = tree_map(self._wrapped, _on_the_host(func, args, kwargs))
        if here and any(returned.alias_info is not None for returned in func._schema.returns):
            found = return_and_correct_aliasing(func, args, kwargs, found)
        returns = func._schema.returns
        views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not views and name not in WITHOUT_LAUNCH:
            self.count(name, here, found)
        return found

    @staticmethod
    def _asks_for_a_count(name: str, args: Any) -> bool:
        chooses = name in ("aten::index", "aten::index_put", "aten::index_put_")
        masks = [x for x in tree_leaves(args[1:2]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        return name in COUNTING or bool(chooses and masks)

    def _wrapped(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device.type != "meta" or isinstance(x, CardTensor):
            return x
        storage = x.untyped_storage()
        if (key := storage._cdata) not in self._storages:
            self._storages.add(key)
            self.counts.live += storage.nbytes()
            self.counts.peak = max(self.counts.peak, self.counts.live)
            weakref.finalize(storage, self._freed, key, storage.nbytes())
        return CardTensor(x)

    def _freed(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.counts.live -= size

    def count(self, name: str, given: list[torch.Tensor], found: Any) -> None:
        """One launch."""
        made = [x for x in tree_leaves(found) if isinstance(x, CardTensor)]
        self.counts.launches[name] += 1
        kind = "matmul" if name in MATMULS else "attention" if any(w in name for w in ATTENTION) else "elementwise"
        self.counts.bytes[kind] += sum(x.numel() * x.itemsize for x in (*given, *made))
        if name in ("aten::_to_copy", "aten::copy_"):
            kinds = {x.dtype for x in (*given, *made)}
            self.counts.casts += len(kinds) > 1 and all(dtype.is_floating_point for dtype in kinds)


def _one_kernel(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False, **more: Any) -> Any:
    """torch's choice on a GPU for as many key heads as query heads; for shapes alone it takes many steps."""
    if attn_mask is not None and any(stride % 8 for stride in attn_mask.stride()[:-1]):
        attn_mask = attn_mask.clone()  # torch pads it
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, False, 0.0, is_causal, scale=more.get("scale"))[0]


def _inner(x: Any) -> Any:
    if isinstance(x, CardTensor):
        return x.inner
    return x.to("meta") if isinstance(x, torch.Tensor) and x.ndim else x


def _on_the_host(func: Any, args: Any, kwargs: Any) -> Any:
    """Of zeros and of masks that are true."""

    def value(x: Any) -> Any:
        if not isinstance(x, CardTensor):
            return x
        return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)

    found = func(*tree_map(value, args), **tree_map(value, kwargs))
    return tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, found)


def _place() -> str:
    """The innermost line of the project that runs."""
    own = [frame for frame in traceback.extract_stack() if "/asyncrlhf/" in frame.filename]
    return f"{own[-1].filename.rpartition('/asyncrlhf/')[2]}:{own[-1].lineno} {own[-1].line}" if own else "elsewhere"


@contextmanager
def learner_on_gpu(
    models: Sequence[transformers.PreTrainedModel],
    algorithm: AlgorithmConfig,
    config: LearnerConfig,
    **options: Any,
) -> Iterator[tuple[PretendedGpu, TorchBackend]]:
    """A learner of the policy ``models[0]``, and of the reference ``models[1]`` if there is one, which are on ``meta``.
    Which way of passing sequences is right is found by values, so it is not asked here. ``options``: of the spec."""

    def policy(model: Any, config: LearnerConfig, _: Any) -> tuple[PackedPolicy, str]:
        packing = config.packing is not False
        return PackedPolicy(model, packing=packing, collision=algorithm.advantage == "opob"), ""

    spec = BackendSpec(learner=config, algorithm=algorithm, steps=100, **options)
    with pretended_gpu() as gpu, ExitStack() as stack:
        for model in models:
            gpu.moved(model)
        stack.enter_context(mock.patch.object(rank_models, "learner_policy", policy))
        stack.enter_context(mock.patch.object(rank_models, "unlike_autocast", lambda *_: ""))
        stack.enter_context(mock.patch.object(nn.Module, "to", lambda module, *_: module))  # it is there
        reference = models[1] if len(models) > 1 else None
        yield gpu, TorchBackend(models[0], spec, reference=reference, device="cuda")


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """In this context ``device="cuda"`` is the pretended GPU."""
    gpu = PretendedGpu()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self: self))
        stack.enter_context(gpu)
        stack.enter_context(_Devices(gpu))
        yield gpu
