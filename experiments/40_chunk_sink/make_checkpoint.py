"""Makes the study's checkpoint: the packaged tiny model, fine-tuned on ledgers and stopped early on purpose.

python -m experiments.40_chunk_sink.make_checkpoint --out tiny-ledger
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ledger = import_module("experiments.40_chunk_sink.ledger")
PACKAGED = Path(__file__).resolve().parents[2] / "asyncrlhf" / "assets" / "tiny-arithmetic"


def make_batch(rng: np.random.Generator, size: int, tokenizer) -> torch.Tensor:
    """[2, N, L] ids, and labels: -100 over the prompt. All rows have one length."""
    asked = ledger.prompts(int(rng.integers(10**9)) + 10, size)
    texts = [prompt + ledger.answer(prompt[: ledger.LINES]) for prompt in asked]
    ids = torch.tensor([[*row, tokenizer.eos_token_id] for row in tokenizer(texts).input_ids])
    labels = ids.clone()
    labels[:, : ledger.LINES + 2] = -100
    return torch.stack([ids, labels])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED)
    model = AutoModelForCausalLM.from_pretrained(PACKAGED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.01, betas=(0.9, 0.95))
    started = time.monotonic()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, step / 20)
        ids, labels = make_batch(rng, args.batch, tokenizer)
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s", flush=True)
            model.save_pretrained(args.out / f"step-{step}")
            tokenizer.save_pretrained(args.out / f"step-{step}")


if __name__ == "__main__":
    main()
