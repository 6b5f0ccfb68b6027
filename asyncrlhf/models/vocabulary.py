"""Which ids a model may sample, and which of them end an answer: by its tokenizer, its embedding and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import load_shape, load_tokenizer, stated_ends
from asyncrlhf.types import Prompt
from asyncrlhf.validation import check

if TYPE_CHECKING:
    import transformers

_ATTRIBUTE = "asyncrlhf_sampled_ids"


def sampled_vocabulary(config: ModelConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    """The number of ids, from 0 on, that may be sampled: those that the tokenizer has, at most the model's.

    An output layer is often padded to a round size. No text has the ids beyond the tokenizer's, so that sampler and
    policies are distributions over the others only.
    """
    return min(_ids(tokenizer), _rows(config))


def limit_vocabulary(config: ModelConfig, *models: Any) -> None:
    """Note on each of ``models``, loaded from the checkpoint, and so on copies made of it later, over how many ids its
    policy is a distribution, unless over all."""
    limit_to(sampled_vocabulary(config, load_tokenizer(config)), *models)


def limit_to(count: int, *models: Any) -> None:
    """As :func:`limit_vocabulary`, of the first ``count`` ids."""
    for model in models:
        if count < int(model.config.get_text_config().vocab_size):
            setattr(model, _ATTRIBUTE, count)


def sampled_ids(model: Any) -> int | None:
    """The number that :func:`limit_vocabulary` noted; None: all ids are sampled."""
    return getattr(model, _ATTRIBUTE, None)


def end_tokens(config: ModelConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's eos token first, then those that the checkpoint states; raises
    ConfigError if the model has none of them."""
    count = sampled_vocabulary(config, tokenizer)
    found = tuple(token for token in _stated(config, tokenizer) if token < count)
    check(
        found,
        f"model.path={config.path}: the end token {tokenizer.eos_token} is beyond the rows of the model's embedding, "
        f"so no response could ever end; {_RESIZE}.",
    )
    return found


def vocabulary_notes(config: ModelConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> list[str]:
    """Sentences for the user about ids that tokenizer, checkpoint and embedding do not share."""
    count, rows = sampled_vocabulary(config, tokenizer), _rows(config)
    notes = []
    if strange := [token for token in _stated(config, tokenizer) if token >= count]:
        ids = ", ".join(map(str, strange))
        notes.append(
            f"model.path={config.path}: end tokens {ids} are not among the model's {count} ids; they are ignored."
        )
    if lost := _lost(config, tokenizer):
        notes.append(
            f"model.path={config.path}: its tokenizer has {len(lost)} tokens beyond the {rows} rows of the model's "
            f"embedding, such as {lost[0]}; a prompt that holds one is refused."
        )
    return notes


def check_prompts(
    config: ModelConfig, tokenizer: transformers.PreTrainedTokenizerBase, prompts: Iterable[Prompt]
) -> None:
    """Raise ConfigError for a prompt that holds an id for which the model has no row."""
    rows = _rows(config)
    if _ids(tokenizer) <= rows:
        return
    found = [int(p.token_ids.max()) for p in prompts if p.token_ids.max(initial=0) >= rows]
    check(
        not found,
        f"model.path={config.path}: a prompt holds {found and tokenizer.convert_ids_to_tokens(found[0])} (id "
        f"{found and found[0]}), and the model's embedding has {rows} rows; {_RESIZE}.",
    )


def check_template(config: ModelConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the chat template writes a token for which the model has no row."""
    template = str(tokenizer.chat_template or "")
    named = [token for token in _lost(config, tokenizer) if token in template]
    check(
        not named,
        f"model.path={config.path}: the chat template writes {named and named[0]}, which is beyond the "
        f"{_rows(config)} rows of the model's embedding; {_RESIZE}.",
    )


_RESIZE = "resize it with model.resize_token_embeddings(len(tokenizer)), and save the checkpoint again"


def _stated(config: ModelConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> list[int]:
    return list(dict.fromkeys([int(tokenizer.eos_token_id), *stated_ends(config)]))  # type: ignore[arg-type]


def _lost(config: ModelConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> list[str]:
    rows = _rows(config)
    return [token for token, place in tokenizer.get_vocab().items() if place >= rows]


def _ids(tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    """One more than the largest id. Some tokenizers of a checkpoint's own code leave special tokens out of
    ``get_vocab``."""
    return max(len(tokenizer), *(place + 1 for place in tokenizer.get_vocab().values()))


def _rows(config: ModelConfig) -> int:
    return int(load_shape(config).get_text_config().vocab_size)
