"""A checkpoint whose responses never end: its end token is one that the model does not use.

With the model's own end token, responses of a fixed length are two different tasks: TRL suppresses the token while it
samples (``min_new_tokens``), and takes one that it finds in a response for its end; ours samples it and goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asyncrlhf.errors import AsyncRLHFError


def spare_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """The last special token without a role, else the one for unknown words, which a byte-level or closed vocabulary
    never needs."""
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    spare = [token for token in special if token not in roles] or [tokenizer.unk_token]
    if spare[-1] in (None, tokenizer.eos_token):
        raise AsyncRLHFError("--fixed-length needs a tokenizer with a special token that the model does not use.")
    return str(spare[-1])


def endless_checkpoint(source: Path, folder: Path) -> Path:
    """``folder`` with links to the weights of ``source``, and a tokenizer and settings with the spare end token."""
    folder.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.eos_token = spare_token(tokenizer)
    tokenizer.save_pretrained(folder)
    for file in source.glob("*.safetensors*"):
        (folder / file.name).symlink_to(file.resolve())
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            settings = json.loads((source / name).read_text())
            (folder / name).write_text(json.dumps(settings | {"eos_token_id": tokenizer.eos_token_id}))
    return folder
