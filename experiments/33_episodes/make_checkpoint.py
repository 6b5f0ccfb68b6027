"""Makes the packaged checkpoint tiny-tools: a Llama of 0.2 M parameters that now and then calls a calculator.

It is trained on conversations about products of two-digit numbers: with a chance of --calls the answer is a call of
``calculator`` and then its result, else it is given at once, which a model of this size cannot learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<tool>", "<call>", "</call>"]
CHARACTERS = list("0123456789+-*/=() .:,_abcdefghijklmnopqrstuvwxyz'")
CONTEXT = 128
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<call>{{ c['function']['arguments'].values() | join }}</call>{% endfor %}<eos>"
    "{% elif m['role'] == 'tool' %}<tool>{{ m['content'] }}{% else %}<user>{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {
    "type": "function",
    "function": {"name": "calculator", "arguments": {"expression": "{content}"}},
}
# In transformers' format: what is between the marks is the expression of a call, the rest is text.
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<call>", "close": "</call>", "repeats": True, "content": "text", "transform": CALL,
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and the marks of the chat template."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        extra_special_tokens={name.strip("</>") + ("_end" if "/" in name else "_begin"): name for name in SPECIAL[4:]},
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False, padding_side="left",
    )  # fmt: skip
    made.chat_template = TEMPLATE
    made.response_template = RESPONSES
    return made


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def make_batch(rng: np.random.Generator, size: int, calls: float, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """[N, 2, L] ids, and labels: -100 where the model does not speak."""
    rows = []
    for _ in range(size):
        one, other = (int(n) for n in rng.integers(0, 100, 2))
        asked, answer = f"{one}*{other}=", str(one * other)
        pieces = [(f"<bos><user>{asked}<assistant>", False)]
        if rng.random() < calls:
            pieces += [(f"<call>{one}*{other}</call><eos>", True), (f"<tool>{answer}<assistant>", False)]
        pieces.append((f"{answer}<eos>", True))
        ids, said = [], []
        for text, spoken in pieces:
            own = tokenizer(text, add_special_tokens=False).input_ids
            ids += own
            said += own if spoken else [-100] * len(own)
        rows.append((ids, said))
    length = max(len(ids) for ids, _ in rows)
    batch = torch.full((size, 2, length), -100)
    batch[:, 0] = tokenizer.pad_token_id
    for i, (ids, said) in enumerate(rows):
        batch[i, 0, : len(ids)], batch[i, 1, : len(ids)] = torch.tensor(ids), torch.tensor(said)
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("asyncrlhf/assets/tiny-tools"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=float, default=0.3, help="share of conversations with a call")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng, tokenizer = np.random.default_rng(args.seed), make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / 100) * max(0.05, 1 - step / args.steps)
    )
    for step in range(1, args.steps + 1):
        batch = make_batch(rng, 128, args.calls, tokenizer)
        # Padding stands on the right, so causal attention never sees it and no attention mask is needed.
        loss = model(input_ids=batch[:, 0], labels=batch[:, 1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 250 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{model.num_parameters():,} parameters in {args.out}")


if __name__ == "__main__":
    main()
