"""Makes the packaged tiny checkpoint: a 0.66 M Llama, trained on two-digit sums and stopped early on purpose."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.tasks.arithmetic import ArithmeticTask
from asyncrlhf.types import Prompt

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = list("0123456789+-*= ")
CONTEXT = 128


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ``<bos>`` opens every prompt, ``<eos>`` ends a response."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def make_batch(prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Prompt, answer and ``<eos>``, padded on the right; only the answer and ``<eos>`` carry a loss."""
    rows = [p.token_ids.tolist() + tokenizer.convert_tokens_to_ids(list(p.answer)) for p in prompts]
    length = max(map(len, rows)) + 1
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), -100)
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[i, : len(row) + 1] = torch.tensor([*row, tokenizer.eos_token_id])
        labels[i, len(prompt.token_ids) : len(row) + 1] = ids[i, len(prompt.token_ids) : len(row) + 1]
    # Padding stands on the right, so causal attention never sees it and no attention mask is needed.
    return {"input_ids": ids, "labels": labels}


@torch.no_grad()
def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: ArithmeticTask,
    prompts: list[Prompt],
    sample: bool,
) -> float:
    batch = tokenizer([p.text for p in prompts], return_tensors="pt", padding=True)
    model.eval()
    out = model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        max_new_tokens=8,
        do_sample=sample,
        top_k=0,
        temperature=1.0 if sample else None,
    )
    model.train()
    texts = tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(task.reward(p, t) for p, t in zip(prompts, texts, strict=True)) / len(prompts)


def train_on_sums(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int = 0,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    max_steps: int = 6000,
    stop_at: float = 0.2,
) -> list[dict[str, float]]:
    """Train until the share ``stop_at`` of sampled held-out answers is right; returns the accuracies on the way."""
    task = ArithmeticTask(TaskConfig(digits=2, heldout_size=512), tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.95))
    source, heldout = task.train_source(seed), task.heldout()
    curve = []
    for step in range(1, max_steps + 1):
        batch = make_batch([source.next() for _ in range(batch_size)], tokenizer)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / 100)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            greedy, sampled = (accuracy(model, tokenizer, task, heldout, sample) for sample in (False, True))
            curve.append({"step": step, "loss": round(loss.item(), 4), "greedy": greedy, "sampled": sampled})
            print(curve[-1], flush=True)
            if sampled >= stop_at:
                break
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-at", type=float, default=0.2, help="sampled held-out accuracy that ends training")
    parser.add_argument("--max-steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--curve", type=Path, default=None, help="a CSV file for the accuracies seen on the way")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    curve = train_on_sums(
        model,
        tokenizer,
        seed=args.seed,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        max_steps=args.max_steps,
        stop_at=args.stop_at,
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    if args.curve:
        with args.curve.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(curve[0]))
            writer.writeheader()
            writer.writerows(curve)


if __name__ == "__main__":
    main()
