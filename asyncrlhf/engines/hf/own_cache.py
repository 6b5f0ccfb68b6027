"""The hf engine's passes for every decoder, by the model's own forward and the cache that this returns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.generation.utils import ALL_CACHE_NAMES

from asyncrlhf.engines.hf.forward import Passes
from asyncrlhf.engines.hf.slots import PREFILL_TOKENS, Prefill, SlotTable
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.copies import to_device
from asyncrlhf.models.plain_pass import own_pass
from asyncrlhf.types import IntArray


@dataclass(frozen=True)
class Cohort:
    """Rows of equal length that advance together, as one batch without padding: padding would enter the states of
    layers that carry one from token to token."""

    cache: Any  # the model's own, of ``length`` tokens of each of ``batch`` rows; None: nothing is kept
    length: int
    batch: int


NOTHING = Cohort(None, 0, 0)


class OwnCachePasses(Passes):
    """Passes by the model's own forward over batches of rows with equal lengths, each batch with its own cache.

    ``caches=False``: nothing is kept, and each step passes the rows' whole sequences again.
    """

    def __init__(self, model: transformers.PreTrainedModel, *, caches: bool = True) -> None:
        self._model = model
        self._caches = caches
        self._kept: dict[int, tuple[Cohort, int]] = {}  # row -> its cohort, and its place in the cohort's batch

    def reserve(self, length: int, response: int = 0) -> None:
        """Nothing to do: a cache grows with its rows."""

    def release(self) -> None:
        self._kept.clear()

    def restore(self) -> None:
        """Nothing to do, as above."""

    def evict(self, table: SlotTable) -> None:
        """Nothing to do: what the model's own cache holds stays."""

    def can_copy(self, tokens: int, prompt: int) -> bool:
        """A state that has passed a token cannot go back, and a row that was prefilled has passed its whole prompt."""
        return not self._caches

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        # The next step selects what each row needs, so that here two rows may hold one place.
        found = [(row, self._kept.get(origin)) for origin, row in zip(source, target, strict=True)]
        for row, place in found:
            self._kept.pop(row, None)
            if place is not None:
                self._kept[row] = place

    def step(self, table: SlotTable, prefills: Sequence[Prefill]) -> torch.Tensor:
        ready = table.ready[: table.count].copy()
        # Other rows hold what an earlier request, or the old weights, left there.
        self._kept = {row: place for row, place in self._kept.items() if row < table.count and ready[row]}
        for _, sharers in prefills:
            ready[sharers] = True
        if self._caches:
            self._prefill(prefills)
        logits: torch.Tensor | None = None
        for cohort, rows in self._cohorts(table, np.flatnonzero(ready)):
            found = self._advance(cohort, rows, table.tokens[rows, cohort.length : table.length[rows[0]]])
            if logits is None:
                logits = found.new_zeros(table.count, found.shape[-1])
            logits[to_device(torch.tensor(rows), found.device)] = found
        assert logits is not None, "a step without a ready row"
        return logits

    def score(self, text: IntArray) -> torch.Tensor:
        return own_logits(self._model, text[None])[0]

    def _prefill(self, prefills: Sequence[Prefill]) -> None:
        """Pass the sequences, those of one length together; the rows that share one hold one place."""
        by_length: dict[int, list[Prefill]] = {}
        for prefill in prefills:
            by_length.setdefault(len(prefill[0]), []).append(prefill)
        for group in by_length.values():
            _, cohort = self._cached_pass(NOTHING, np.stack([sequence for sequence, _ in group]))
            for place, (_, sharers) in enumerate(group):
                self._kept |= {row: (cohort, place) for row in sharers}

    def _cohorts(self, table: SlotTable, rows: IntArray) -> Iterator[tuple[Cohort, list[int]]]:
        """Groups of ``rows`` with one cohort and one length."""
        groups: dict[tuple[int, int], tuple[Cohort, list[int]]] = {}
        for row in rows.tolist():
            length = int(table.length[row])
            cohort, _ = self._kept.get(row, (NOTHING, 0))
            if cohort.length != length - 1:  # nothing is kept, or what a former request left in a row of one token
                self._kept.pop(row, None)
                cohort = NOTHING
            groups.setdefault((id(cohort), length), (cohort, []))[1].append(row)
        yield from groups.values()

    def _advance(self, cohort: Cohort, rows: list[int], tokens: IntArray) -> torch.Tensor:
        """Pass the ``tokens`` [n, l] that follow what the rows hold -> logits [n, V] after the last one."""
        if not self._caches:
            most = max(1, PREFILL_TOKENS // tokens.shape[1])
            parts = [tokens[i : i + most] for i in range(0, len(tokens), most)]
            return torch.cat([own_logits(self._model, part, last=1)[:, -1] for part in parts])
        if cohort.cache is not None:
            places = [self._kept[row][1] for row in rows]
            if places != list(range(cohort.batch)):
                chosen = select_rows(cohort.cache, to_device(torch.tensor(places), self._model.device), cohort.batch)
                cohort = Cohort(chosen, cohort.length, len(rows))
        logits, advanced = self._cached_pass(cohort, tokens)
        self._kept |= {row: (advanced, place) for place, row in enumerate(rows)}
        return logits

    def _cached_pass(self, cohort: Cohort, tokens: IntArray) -> tuple[torch.Tensor, Cohort]:
        """Pass tokens [n, l] behind a cohort's, whose cache may be written -> logits [n, V] after the last token, and
        the longer cohort."""
        accepted = inspect.signature(self._model.forward).parameters
        name = next((name for name in ALL_CACHE_NAMES if name in accepted), None)
        if name is None:
            raise ConfigError(f"{type(self._model).__name__} takes no cache.")
        length = cohort.length + tokens.shape[1]
        given: dict[str, Any] = {} if cohort.cache is None else {name: cohort.cache}
        if cohort.cache is not None and "position_ids" in accepted:
            # Some families count from 0 without it, whatever the cache holds.
            given["position_ids"] = torch.arange(cohort.length, length, device=self._model.device)[None]
        output = own_pass(self._model, _ids(self._model, tokens), last=1, use_cache=True, **given)
        if output.get(name) is None:
            raise ConfigError(f"{type(self._model).__name__} returns no cache.")
        return output.logits[:, -1], Cohort(output[name], length, len(tokens))


def own_logits(model: transformers.PreTrainedModel, tokens: IntArray, *, last: int = 0) -> torch.Tensor:
    """Logits [n, l, V], or fewer tokens of them (``own_pass``), without any cache."""
    logits: torch.Tensor = own_pass(model, _ids(model, tokens), last=last).logits
    return logits


def _ids(model: transformers.PreTrainedModel, tokens: IntArray) -> torch.Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(tokens, np.int64)), model.device)


def select_rows(cache: Any, rows: torch.Tensor, batch: int) -> Any:
    """A copy of a cache of ``batch`` rows with ``rows`` [n] of them, in this order; a row may be there several times.

    It selects in every tensor that the cache holds, at any depth: the methods of transformers' own classes select keys
    and values, but forget the states of several kinds of layers.
    """
    copies: dict[int, Any] = {}  # by identity, since layers may hold one tensor together

    def selected(value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = _selected(value)
        return copies[id(value)]

    def _selected(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            has_rows = value.dim() > 0 and len(value) == batch
            return value.index_select(0, rows.to(value.device)) if has_rows else value.clone()
        if isinstance(value, list | tuple):
            return type(value)([selected(item) for item in value])
        if isinstance(value, dict):
            whole = copy.copy(value)
            whole.update({key: selected(item) for key, item in value.items()})
            return whole
        if isinstance(value, nn.Module | transformers.PreTrainedConfig | type) or not hasattr(value, "__dict__"):
            return value
        whole = copy.copy(value)
        whole.__dict__.update({name: selected(item) for name, item in vars(value).items()})
        return whole

    return selected(cache)
