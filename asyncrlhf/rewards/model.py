"""Scores from a sequence-classification reward model, in batches of few padded tokens; loading of its checkpoint, which
refuses an untrained head; and the model's input for a rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from asyncrlhf.data.branches import last_branch
from asyncrlhf.data.data_config import refuse_pickled_weights
from asyncrlhf.errors import ConfigError, RewardError
from asyncrlhf.rewards.model_thread import ModelThread
from asyncrlhf.rewards.reward import RewardSource, Score
from asyncrlhf.rewards.reward_config import RewardModelConfig
from asyncrlhf.types import IntArray, Rollout

HEAD = "ForSequenceClassification"


def check_reward_model(config: RewardModelConfig, key: str) -> None:
    """Raise ConfigError unless the checkpoint's config is that of a reward model; reads no weights."""
    found = load(transformers.AutoConfig, config, key)
    named = [str(name) for name in getattr(found, "architectures", None) or []]
    if not any(name.endswith(HEAD) for name in named):
        raise ConfigError(
            f"{key}.model.path={config.path} is a checkpoint of {', '.join(named) or 'no named architecture'}, whose "
            f"score would come from an untrained head; allowed: ...{HEAD} with one label."
        )
    if found.num_labels != 1:
        raise ConfigError(
            f"{key}.model.path={config.path} has {found.num_labels} labels; allowed: a reward model, which has one."
        )


def load_reward_model(config: RewardModelConfig, key: str, device: str) -> transformers.PreTrainedModel:
    """The model in ``eval()``; raises ConfigError for a missing weight: transformers would initialise it randomly."""
    check_reward_model(config, key)
    dtype = getattr(torch, config.dtype)
    model, report = load(
        transformers.AutoModelForSequenceClassification, config, key,
        dtype=dtype, output_loading_info=True, use_safetensors=True,
    )  # fmt: skip
    missing = sorted(report["missing_keys"]) + [str(entry) for entry in report.get("mismatched_keys", ())]
    if missing:
        raise ConfigError(
            f"{key}.model.path={config.path} lacks {len(missing)} of its model's weights, such as {missing[0]}; they "
            "would be initialised randomly."
        )
    loaded: transformers.PreTrainedModel = model.to(device).eval()
    return loaded


def load(auto: Any, config: RewardModelConfig, key: str, **options: Any) -> Any:
    """The checkpoint loaded with transformers' ``auto`` class; raises ConfigError if that fails."""
    path = Path(config.path).expanduser()
    local = path.is_dir()
    looks_local = config.path.startswith((".", "/", "~")) or config.path.count("/") > 1 or config.path.endswith("/")
    if not local and (looks_local or path.exists()):
        raise ConfigError(f"{key}.model.path={config.path} is not a folder; give a checkpoint's folder or a hub name.")
    if local:
        refuse_pickled_weights(path, f"{key}.model.path={config.path}")
    name = str(path) if local else config.path
    try:
        return auto.from_pretrained(name, trust_remote_code=config.trust_remote_code, **options)
    # The hub client and transformers raise these for whatever is wrong with a name or a folder.
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ConfigError(f"{key}.model.path={config.path} could not be loaded: {reason}.") from error


Encoder = Callable[[Rollout], IntArray]  # -> token ids [P+L] of prompt and response, without padding


def build_encoder(config: RewardModelConfig, key: str, policy: transformers.PreTrainedTokenizerBase) -> Encoder:
    """The encoder for ``inputs``; raises ConfigError if the checkpoint has no tokenizer or template."""
    if config.inputs == "ids":
        return policy_ids
    try:
        own: transformers.PreTrainedTokenizerBase = load(transformers.AutoTokenizer, config, key)
    except ConfigError as error:
        raise ConfigError(
            f"{error} Where its tokens are the policy's, {key}.model.inputs=ids needs no tokenizer."
        ) from error
    if config.chat_template:
        if not own.chat_template:
            raise ConfigError(
                f"{key}.model.chat_template=true, but the tokenizer of {key}.model.path={config.path} has none."
            )
        return partial(chat_ids, own)
    if config.inputs == "auto" and same_tokens(own, policy):
        return policy_ids
    return partial(text_ids, own)


def policy_ids(rollout: Rollout) -> IntArray:
    """The tokens that the policy saw and sampled, including its stop token."""
    row = np.concatenate([rollout.prompt.token_ids, rollout.response_ids]).astype(np.int64)
    return row[last_branch(rollout)] if rollout.forks else row


def text_ids(tokenizer: transformers.PreTrainedTokenizerBase, rollout: Rollout) -> IntArray:
    """Prompt and response as one plain text, with the end token if the response is complete."""
    ids = list(tokenizer(rollout.prompt.text + rollout.response_text).input_ids)
    end = tokenizer.eos_token_id
    if rollout.finish_reason == "stop" and end is not None and (not ids or ids[-1] != end):
        ids.append(end)
    return np.asarray(ids, dtype=np.int64)


def chat_ids(tokenizer: transformers.PreTrainedTokenizerBase, rollout: Rollout) -> IntArray:
    """The conversation, of two turns if the prompt is a text, in the model's chat template."""
    turns: list[Any] = [
        *(rollout.prompt.messages or [{"role": "user", "content": rollout.prompt.text}]),
        {"role": "assistant", "content": rollout.response_text},
    ]
    # As text first: the template writes the special tokens itself.
    rendered: Any = tokenizer.apply_chat_template(turns, tokenize=False)
    return np.asarray(tokenizer(rendered, add_special_tokens=False).input_ids, dtype=np.int64)


def same_tokens(one: transformers.PreTrainedTokenizerBase, other: transformers.PreTrainedTokenizerBase) -> bool:
    """Whether both give every token the same id, including special ones."""
    return one.get_vocab() == other.get_vocab() and one.all_special_ids == other.all_special_ids


# Added to the message of a pass over the time limit, in case the model is only slow.
SLOW_PASS = "If it is only slow, raise that or lower reward.max_batch_tokens."


class ModelSource(RewardSource):
    """One forward pass per batch of up to ``max_batch_tokens`` padded tokens; a longer sequence is a separate batch.

    Raises ConfigError for a checkpoint that cannot be loaded or is no reward model. ``model``, ``encoder``, ``thread``
    and ``is_causal`` are public for other ways to feed the model, such as chunk by chunk. A pass that takes
    longer than ``thread`` allows (by default there is no limit) raises StuckError.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        key: str,
        policy: transformers.PreTrainedTokenizerBase,
        *,
        max_batch_tokens: int,
        device: str = "cpu",
        thread: ModelThread | None = None,
    ) -> None:
        self.thread = thread if thread is not None else ModelThread()
        self.model = self.thread.call_without_limit(lambda: load_reward_model(config, key, device))
        self.encoder: Encoder = build_encoder(config, key, policy)
        self.is_causal = is_causal(self.model)
        # Of prompt and response together; bounded by the model's context, if known.
        self.max_length = min(limit for limit in (config.max_length, context_of(self.model)) if limit)
        self._key = key
        self._max_batch_tokens = max_batch_tokens

    def scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        encoded = [self.encoder(rollout) for rollout in rollouts]
        scores: list[Score] = [self.refusal(ids) or 0.0 for ids in encoded]
        fitting = [i for i, score in enumerate(scores) if not isinstance(score, RewardError)]
        lengths = np.array([len(encoded[i]) for i in fitting], dtype=np.int64)
        for batch in padded_batches(lengths, self._max_batch_tokens):
            chosen = [fitting[i] for i in batch]
            for i, value in zip(chosen, self._forward([encoded[i] for i in chosen]), strict=True):
                scores[i] = value if math.isfinite(value) else RewardError(f"The reward model's score is {value}.")
        return scores

    def refusal(self, ids: IntArray) -> RewardError | None:
        """Why a sequence [P+L] cannot be scored; None if it can."""
        if not len(ids):
            return RewardError("The reward model got no token: prompt and response are empty.")
        if len(ids) > self.max_length:
            return RewardError(
                f"The reward model's input has {len(ids)} tokens; allowed: {self.max_length} "
                f"({self._key}.model.max_length, at most its context)."
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            return RewardError(f"A token id lies outside the reward model's vocabulary of {self.vocabulary}.")
        return None

    @property
    def vocabulary(self) -> int:
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.num_embeddings)

    def _forward(self, sequences: Sequence[IntArray]) -> list[float]:
        size = f"{len(sequences)} sequences of up to {max(map(len, sequences))} tokens"
        try:
            scores = self.thread.call(
                f"A pass of the reward model over {size}",
                lambda: score_batch(self.model, *padded(sequences, self.model.device)).cpu(),
                SLOW_PASS,
            )
            return [float(v) for v in scores]
        except torch.OutOfMemoryError as error:
            raise RewardError(
                f"The reward model ran out of memory with {size}; lower reward.max_batch_tokens."
            ) from error

    def close(self) -> None:
        self.thread.close()


@torch.inference_mode()
def score_batch(
    model: transformers.PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """[N] float32 scores of padded sequences [N, T], padded on either side.

    A causal model's score is that of the last token in ``attention_mask``. transformers' own pooling uses
    the last token that is not ``pad_token_id`` instead, and so skips an end token that is also the pad token.
    """
    if not is_causal(model):
        logits: torch.Tensor = model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits[:, 0].float()
    base: Any = model.base_model
    options: dict[str, Any] = {}
    padded_left = not bool(attention_mask[:, 0].all())
    if padded_left and "position_ids" in signature(base.forward).parameters:  # others read positions off the mask
        options["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    hidden = base(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **options).last_hidden_state
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    last = (attention_mask * places).argmax(-1)
    return head_of(model)(hidden[torch.arange(len(hidden), device=hidden.device), last])[:, 0].float()


def head_of(model: transformers.PreTrainedModel) -> torch.nn.Linear:
    """The layer of a causal reward model that maps a hidden state [H] to a score [1]."""
    head: torch.nn.Linear = model.score  # type: ignore[assignment]
    return head


def is_causal(model: transformers.PreTrainedModel) -> bool:
    """Whether a score is a linear layer on the last token's state, as in all of transformers' decoders; encoders pool
    differently."""
    return isinstance(getattr(model, "score", None), torch.nn.Linear)


def context_of(model: transformers.PreTrainedModel) -> int:
    """The longest text in tokens, if the model's config has it."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)


def padded_batches(lengths: IntArray, budget: int) -> list[list[int]]:
    """Indices into ``lengths`` [N], longest first, in batches whose rows times longest row stay within ``budget``."""
    batches: list[list[int]] = []
    rows_allowed = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        if not batches or len(batches[-1]) >= rows_allowed:
            batches.append([])
            rows_allowed = max(1, budget // max(1, int(lengths[index])))
        batches[-1].append(index)
    return batches


def padded(texts: Sequence[Sequence[int] | IntArray], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N, T] of N texts, padded with zeros at the end, and a mask that is 1 for tokens."""
    rows = [torch.from_numpy(np.asarray(text, dtype=np.int64)) for text in texts]
    pad = torch.nn.utils.rnn.pad_sequence
    ids, mask = pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)
    return ids.to(device), mask.to(device)
