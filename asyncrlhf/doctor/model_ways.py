"""Which way learner and engine take for a model: found on a small model of its family, against plain passes."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from asyncrlhf.data.packing import pack
from asyncrlhf.engines.hf.hf_engine import HFEngine
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.models.miniature import MISFITS, WINDOW
from asyncrlhf.types import GenerationRequest, IntArray, Prompt, Rollout, SamplingParams, TrainSample

REFUSED = "refused"
PACKED, ALONE = "packed", "one sequence at a time"
LENGTHS = ((5, 3 * WINDOW + 2), (5, 7), (9, 2 * WINDOW + 3), (9, 12))  # tokens of prompt and response; pairs share one
STEPS = 2
# Float32 log-probs of the small models: rounding moves one by some 1e-5, a wrong mask, position or state by 1e-2.
EXACT = 1e-3
# What the code of any family may raise when it is called in a way that it does not know.
_FAULTS = (*MISFITS, ArithmeticError, AsyncRLHFError)


@dataclass(frozen=True)
class Way:
    """How a part runs a model. ``why``: the sentence of a refusal, or of what was refused before this way."""

    name: str
    why: str = ""

    @property
    def refused(self) -> bool:
        return self.name == REFUSED


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of transformers and of the walls: their sentences are in the ways found."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


def plain_copy(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A copy that computes as transformers does without any kernel of ours."""
    own = copy.deepcopy(model).eval()
    # Families without an implementation of this name keep their own.
    if own._can_set_attn_implementation():
        own.set_attn_implementation("eager")
    return own


def plain_logprobs(model: transformers.PreTrainedModel, text: IntArray, first: int) -> torch.Tensor:
    """Of the tokens from place ``first`` on, by one pass over this text alone."""
    ids = torch.from_numpy(np.asarray(text, np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)[:-1].gather(1, ids[1:, None])[first - 1 :, 0]


def texts_of(model: transformers.PreTrainedModel) -> list[tuple[IntArray, int]]:
    """Texts with the lengths of their prompts; the second of two siblings has the prompt of the first."""
    draws = np.random.default_rng(0)
    size = min(int(model.get_input_embeddings().num_embeddings), 64)  # type: ignore[arg-type]
    found: list[tuple[IntArray, int]] = []
    for prompt, response in LENGTHS:
        begin = found[-1][0][:prompt] if found and found[-1][1] == prompt else draws.integers(3, size, prompt)
        found.append((np.concatenate([begin, draws.integers(3, size, response)]), prompt))
    return found


def attempt(way: Callable[[], Way]) -> Way:
    """What the call finds; refused with its sentence if it raises."""
    try:
        with quiet():
            return way()
    except ConfigError as error:
        return Way(REFUSED, str(error))
    except _FAULTS as error:
        words = " ".join(str(error).split())[:160].rstrip(". ")
        return Way(REFUSED, f"Its code raises {type(error).__name__}: {words}.")


# The learner.


def learner_way(model: transformers.PreTrainedModel, trained: dict[str, torch.Tensor] | None = None) -> Way:
    """The way that the learner chooses for ``model``, which stays as it is. ``trained`` receives the weights after two
    steps. Refused if log-probs or gradients differ from those of plain passes, before or after those steps."""
    return attempt(lambda: _learns(model, trained))


def _learns(model: transformers.PreTrainedModel, trained: dict[str, torch.Tensor] | None) -> Way:
    spec = BackendSpec(learner=LearnerConfig(learning_rate=1e-3), algorithm=AlgorithmConfig(), steps=STEPS)
    backend = TorchBackend(copy.deepcopy(model), spec)
    texts, plain = texts_of(model), plain_copy(backend.model)
    for step in range(STEPS + 1):
        plain.load_state_dict(backend.model.state_dict())
        with torch.set_grad_enabled(step == 0):
            expected = [plain_logprobs(plain, text, prompt) for text, prompt in texts]
            batch = pack([_sample(i, *text, expected[i], step) for i, text in enumerate(texts)])
            found, wanted = backend.policy(PackedInputs.of_batch(batch), 1.0).logprobs, torch.cat(expected)
        if not float((found - wanted).abs().max()) <= EXACT:
            when = f" after step {step}" if step else ""
            return Way(REFUSED, f"Its log-probs{when} differ from those of a plain pass over each sequence.")
        if step == 0 and not _same_gradients(backend.model, plain, found, wanted):
            return Way(REFUSED, "Its gradients differ from those of a plain pass over each sequence.")
        if step < STEPS and backend.train_step(batch).skipped:
            return Way(REFUSED, "Its gradients are not finite.")
    if trained is not None:
        trained.update({name: tensor.detach().clone() for name, tensor in backend.parameters().items()})
    return Way(PACKED if backend.policy.packing else ALONE, backend.note)


def _same_gradients(model: torch.nn.Module, plain: torch.nn.Module, found: torch.Tensor, wanted: torch.Tensor) -> bool:
    weights = torch.linspace(-1, 1, len(found))
    sides = []
    for network, logprobs in ((model, found), (plain, wanted)):
        network.zero_grad(set_to_none=True)
        (logprobs * weights).sum().backward()
        sides.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    ours, theirs = sides
    if not theirs:
        return False
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    zero = torch.zeros(())
    return all(
        float((ours.get(name, zero) - theirs.get(name, zero)).abs().max()) <= EXACT * largest
        for name in ours.keys() | theirs.keys()
    )


def _sample(index: int, text: IntArray, prompt: int, behavior: torch.Tensor, version: int) -> TrainSample:
    rollout = Rollout(
        rollout_id=index,
        group_id=index // 2,
        prompt=Prompt(str(index // 2), "", text[:prompt]),
        response_ids=text[prompt:],
        behavior_logprobs=behavior.detach().numpy(),
        policy_versions=np.full(len(text) - prompt, version, np.int64),
        finish_reason="stop",
    )
    return TrainSample(rollout, float(index % 2))


# The hf engine.


def engine_way(model: transformers.PreTrainedModel, trained: dict[str, torch.Tensor] | None = None) -> Way:
    """The way in which the hf engine samples from ``model``, which stays as it is. ``trained``: weights that it loads
    after the first answers. Refused if the log-probs of sampled tokens differ from those of plain passes."""
    return attempt(lambda: _samples(model, trained or {}))


def _samples(model: transformers.PreTrainedModel, trained: dict[str, torch.Tensor]) -> Way:
    plain, engine = plain_copy(model), HFEngine(copy.deepcopy(model), slots=3)
    for version, weights in enumerate([{}, trained] if trained else [{}]):
        if weights:
            engine.load_weights(version, weights, "recompute")
            unknown = plain.load_state_dict(weights, strict=False).unexpected_keys
            if unknown:
                return Way(REFUSED, f"The learner's weights have names that the model lacks, such as {unknown[0]}.")
        for answer in _answers(engine, texts_of(model)):
            if not isinstance(answer, Rollout):
                return Way(REFUSED, str(answer.error))
            text = np.concatenate([answer.prompt.token_ids, answer.response_ids])
            with torch.no_grad():
                wanted = plain_logprobs(plain, text, len(answer.prompt.token_ids))
            if not float((torch.from_numpy(answer.behavior_logprobs) - wanted).abs().max()) <= EXACT:
                when = " after new weights" if weights else ""
                why = f"The log-probs of its samples{when} differ from those of a plain pass over each sequence."
                return Way(REFUSED, why)
    engine.close()
    return Way(passes_of(engine), engine.note)


def _answers(engine: HFEngine, texts: Sequence[tuple[IntArray, int]]) -> Iterator[Any]:
    """Answers that together pass some windows of the model, with siblings, and more requests than slots."""
    engine.submit(
        [
            GenerationRequest(i, i // 2, Prompt(str(i // 2), "", text[:prompt]), i, SamplingParams(len(text) - prompt))
            for i, (text, prompt) in enumerate(texts)
        ]
    )
    while engine.in_flight():
        yield from engine.step(0.0).finished


def passes_of(engine: HFEngine) -> str:
    """What the engine keeps of its rows."""
    passes: Any = engine._passes
    if type(passes).__name__ == "SlotPasses":
        return "slots"
    return "own caches" if getattr(passes, "_caches", True) else "no cache"


# Checkpoints.


def export_way(model: transformers.PreTrainedModel, folder: Path) -> Way:
    """Whether the learner's checkpoint of ``model`` can be loaded again with the same logits."""

    def saved() -> Way:
        model.save_pretrained(folder)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()
        with torch.no_grad():
            one, two = (plain_logprobs(each, texts_of(model)[0][0], 1) for each in (model, again))
        same = float((one - two).abs().max()) <= 1e-5
        return Way("yes") if same else Way(REFUSED, "Loaded again, it has other logits.")

    return attempt(saved)


def without_figures(sentence: str) -> str:
    """A sentence whose figures depend on the machine, without them."""
    without = re.sub(r"\s*\((\d+|[^()]*\d\.\d[^()]*)\)", "", sentence)
    return re.sub(r"(?<=change) by [\d.e+-]+|(?<=are) [\d.e+-]+(?= off)", "", without)
