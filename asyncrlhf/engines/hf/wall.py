"""The hf engine's wall: before the first request, its ways to pass rows are compared with transformers' own pass over
each sequence alone, and the fastest one that computes the same is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import transformers

from asyncrlhf.engines.hf.forward import Passes, SlotPasses
from asyncrlhf.engines.hf.kv_cache import Kept
from asyncrlhf.engines.hf.own_cache import OwnCachePasses, own_logits
from asyncrlhf.engines.hf.slots import SlotTable, choose_prefills
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import context_of, longest_span
from asyncrlhf.models.miniature import Family
from asyncrlhf.models.plain_pass import MISCALLED, first_line, plain_attention, set_attention
from asyncrlhf.types import GenerationRequest, IntArray, Prompt, SamplingParams

ROWS = 5  # of the comparison, at once
LONG = 3  # the longest text's row
LATE = ROWS - 1  # the row that moves, and then gets the late sibling
SIBLING = ROWS  # the late sibling's place among the texts
STEPS = 4  # tokens decoded in each row
SHORT, PROMPT = 4, 9  # tokens of a prompt that one row has, and of one that three rows share
LONGEST = 256  # tokens of the longest text, unless a window of the model is longer
# Operations of one pass over the longest text: some tenths of a second of a core, tens of milliseconds of a GPU.
AFFORDABLE = {"cpu": 5e9, "cuda": 1e13}
# Largest difference of log-probs allowed, relative to the distance between the likeliest token and the median one. In
# single precision rounding reaches 1e-5 of it, and a wrong mask, position or state a hundredth.
EXACT = 5e-4
# The same for the mean over the vocabulary, where numbers have 8 to 11 bits: rounding reaches 0.01 of that distance.
COARSE = 0.05


@dataclass(frozen=True)
class Way:
    """A way to pass rows. ``attention``: transformers' name of the model's own; None: ours, over packed rows.
    ``caches``: whether the model's own cache is kept."""

    attention: str | None = None
    caches: bool = True

    @property
    def name(self) -> str:
        if self.attention is None:
            return "packed rows"
        return ("transformers' own cache" if self.caches else "no cache") + f" and {self.attention} attention"

    def passes(
        self, model: transformers.PreTrainedModel, slots: int, kept: Kept | None = None, graphs: bool = False
    ) -> Passes:
        if self.attention is None:
            return SlotPasses(model, slots, kept, graphs)
        set_attention(model, self.attention)
        return OwnCachePasses(model, caches=self.caches)


def find_passes(
    model: transformers.PreTrainedModel, slots: int, routes: bool = False, kept: Kept | None = None
) -> tuple[Passes, str]:
    """The fastest passes for ``slots`` rows of ``model`` that agree with its own pass by transformers' eager attention,
    and a sentence why they are slow, which is empty for packed passes. ``routes`` and
    ``kept``: only packed passes will do, which report experts or evict tokens.

    A tiny model of the same family is compared first, whose windows the texts exceed; then the model itself. Nothing is
    kept of the comparison. Raises ConfigError if none agrees.
    """
    own = str(model.config._attn_implementation)
    plain = [own] if own == "eager" else [own, "eager"]
    ways = (Way(), *(Way(attention, caches) for caches in (True, False) for attention in plain))
    on_gpu = model.device.type == "cuda"
    with torch.random.fork_rng([model.device] if on_gpu else []):
        ways, found = _family_ways(Family.of(model), ways[:1] if routes or kept else ways)
        ways, reasons = _right_ways(model, ways)
    found = found or reasons
    slower = ""
    if found:
        slower = (
            f"generator.engine=hf passes the rows of {_name(model)} with {ways[0].name}, which is slower than packed "
            f"rows: {'; '.join(found)}."
        )
    # New ones, which have seen no row.
    return ways[0].passes(model, slots, kept, graphs=on_gpu and not routes and kept is None), slower


@lru_cache(maxsize=32)
def _family_ways(family: Family, ways: tuple[Way, ...]) -> tuple[tuple[Way, ...], list[str]]:
    """As :func:`_right_ways` of a small model of the family; all of ``ways`` without such a model."""
    small = family.small()
    return (ways, []) if small is None else _right_ways(small, ways)


def _right_ways(model: transformers.PreTrainedModel, ways: tuple[Way, ...]) -> tuple[tuple[Way, ...], list[str]]:
    """The first of ``ways`` that is right with those after it, and what is wrong with each of those before."""
    own, wall = model.config._attn_implementation, Wall(model)
    reasons: list[str] = []
    for place, way in enumerate(ways):
        reason = wall.refusal(partial(way.passes, model, ROWS))
        if reason is None:
            set_attention(model, own)
            return ways[place:], reasons
        reasons.append(f"with {way.name}, {reason}")
    if len(ways) == 1:
        raise ConfigError(
            f"generator.engine=hf can neither report experts nor evict tokens of {_name(model)}: only its packed "
            f"passes can, and {reasons[0]}."
        )
    raise ConfigError(
        f"generator.engine=hf cannot run {_name(model)}: {'; '.join(dict.fromkeys(reasons))}; choose another model."
    )


def _name(model: transformers.PreTrainedModel) -> str:
    kinds = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()))
    return type(model).__name__ + (f" (layers: {', '.join(kinds)})" if kinds else "")


@dataclass(frozen=True)
class Text:
    tokens: IntArray  # [L]
    prompt: int  # tokens of its prompt; the others are decoded


class Wall:
    """Texts, and the model's own log-probs of them, with transformers' eager attention; in half precision with the
    attention as it is, because another rounding would send some tokens to other experts."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        """Raises ConfigError for a model whose forward pass changes its weights."""
        self._model = model
        self._texts = _texts(model)
        before = [parameter._version for parameter in model.parameters()]
        eager = nullcontext() if _is_coarse(model) else plain_attention(model)
        with eager, torch.inference_mode():
            self._own = [
                _last_logprobs(own_logits(model, text.tokens[None], last=STEPS + 1)[0]) for text in self._texts
            ]
        if [parameter._version for parameter in model.parameters()] != before:
            raise ConfigError(
                f"generator.engine=hf cannot run {type(model).__name__}: its forward pass changes its own weights, "
                "so that they are not those that the learner sends; choose another model."
            )

    def refusal(self, build: Callable[[], Passes]) -> str | None:
        """Why the passes that ``build`` makes cannot be used, as a clause, or None."""
        try:
            passes = build()  # outside of inference mode: it may replace weights, into which others are loaded later
            with torch.inference_mode():
                ways = {"a whole pass": self._scored(passes), "decoding": self._decoded(passes)}
            for way, pairs in ways.items():
                found, allowed, kind = self._difference(pairs)
                if not found <= allowed:
                    return (
                        f"{way} differs from the model's own pass over each sequence ({kind} difference of log-probs "
                        f"is {found:.2g}, allowed {allowed:.2g})"
                    )
        except torch.OutOfMemoryError:
            raise
        except ConfigError as error:
            # Of "generator.engine=hf cannot run X: REASON; choose another model."
            return str(error).rstrip(".").split(": ", 1)[-1].split(";")[0]
        except MISCALLED as error:
            return f"its code raises {type(error).__name__}: {first_line(error)[:200]}"
        return None

    def _difference(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float, str]:
        """Of log-probs [n, V], found and expected: their difference, what is allowed, and which difference it is."""
        found, expected = (torch.cat(side) for side in zip(*pairs, strict=True))
        # Vocabularies may end in entries of -inf.
        apart = torch.where(found == expected, 0.0, (found - expected).abs())
        apart = torch.where(apart.isnan(), torch.inf, apart)
        scale = float((expected.amax(-1) - expected.median(-1).values).max())
        if _is_coarse(self._model):
            return float(apart.mean(-1).max()), COARSE * scale, "a token's mean"
        return float(apart.max()), EXACT * scale, "the largest"

    def _scored(self, passes: Passes) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs [n, V] of the longest text and of the shortest, found and expected."""
        return [(_last_logprobs(passes.score(self._texts[i].tokens)), self._own[i]) for i in (LONG, LATE)]

    def _decoded(self, passes: Passes) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Decode the texts, given their tokens -> log-probs of each token's followers [V], found and expected.

        As in an engine, siblings share a prefill, a row ends and another one moves to its place, and a late sibling
        gets what an earlier one keeps of their prompt, if that can be.
        """
        table, held = SlotTable(ROWS), list(range(ROWS))
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def enter(row: int, ready: bool) -> None:
            text = self._texts[held[row]]
            prompt = Prompt("", "", text.tokens[: text.prompt])
            passes.reserve(len(text.tokens))
            table.occupy(row, GenerationRequest(row, row, prompt, 0, SamplingParams(STEPS)), ready)
            table.tokens[row, : len(text.tokens)] = text.tokens
            table.count = row + 1

        def step() -> None:
            prefills = choose_prefills(table)
            logits = passes.step(table, prefills)
            for _, sharers in prefills:
                table.ready[sharers] = True
            rows = np.flatnonzero(table.ready[: table.count])
            for row, found in zip(rows.tolist(), _logprobs(logits[torch.from_numpy(rows)]), strict=True):
                pairs.append((found[None], self._own[held[row]][[table.length[row] - table.prompt_length[row]]]))
            table.length[rows] += 1

        for row in range(ROWS):
            enter(row, ready=False)
        step()
        step()
        passes.copy_rows([LATE], [0], int(table.length[LATE]))
        table.move(LATE, 0)
        table.count, held[0] = LATE, LATE
        step()
        held[LATE] = SIBLING
        given = passes.can_copy(int(table.length[1]), int(table.prompt_length[1]))
        if given:
            passes.copy_rows([1], [LATE], int(table.prompt_length[1]))
        enter(LATE, ready=given)
        step()
        return pairs


def _texts(model: transformers.PreTrainedModel) -> list[Text]:
    """Random texts of the first rows, and one that a later row gets: 1 and 2 are siblings of ``SIBLING``."""
    embedding: Any = model.get_input_embeddings()
    config: Any = model.config.get_text_config()
    wanted = max(LONGEST, longest_span(config) + STEPS + 2)
    weights = sum(parameter.numel() for parameter in model.parameters())
    affordable = AFFORDABLE["cuda" if model.device.type == "cuda" else "cpu"] / (2 * weights)
    room = context_of(config) - STEPS
    long = max(1, min(wanted - STEPS, int(affordable), room))
    rng = np.random.default_rng(0)

    def random(size: int) -> IntArray:
        return rng.integers(0, int(embedding.num_embeddings), size, dtype=np.int64)

    shared = random(min(PROMPT, room))
    prompts = [random(min(SHORT, room)), shared, shared, random(long), random(1), shared]
    return [Text(np.concatenate([prompt, random(STEPS)]), len(prompt)) for prompt in prompts]


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def _last_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Of the followers of a prompt's last token and of each decoded one [STEPS + 1, V]."""
    return _logprobs(logits[-STEPS - 1 :])


def _is_coarse(model: transformers.PreTrainedModel) -> bool:
    """Whether products round to 8 to 11 bits: half precision, or TF32."""
    if model.dtype in (torch.bfloat16, torch.float16):
        return True
    if model.device.type != "cuda" or model.dtype != torch.float32:
        return False
    convolves = any(isinstance(module, torch.nn.Conv1d) for module in model.modules())
    return torch.backends.cuda.matmul.allow_tf32 or (convolves and torch.backends.cudnn.allow_tf32)
