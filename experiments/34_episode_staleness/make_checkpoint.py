"""Makes the study's checkpoint: the packaged tiny-tools, fine-tuned on conversations of up to eight products.

The packaged one has seen a single product in at most 30 tokens. This one has a context of 256 tokens, and calls the
calculator in a share --calls of its turns, wherever they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGED = Path(__file__).resolve().parents[2] / "asyncrlhf" / "assets" / "tiny-tools"
CONTEXT, MOST = 256, 8


def conversation(rng: np.random.Generator, questions: int, calls: float) -> list[tuple[str, bool]]:
    """Pieces of text, and whether the model speaks."""
    pieces, told = [("<bos>", False)], ""
    for left, right in rng.integers(0, 100, (questions, 2)).tolist():
        pieces.append((f"{told}<user>{left}*{right}=<assistant>", False))
        called = rng.random() < calls
        pieces.append((f"<call>{left}*{right}</call><eos>" if called else f"{left * right}<eos>", True))
        told = f"<tool>{left * right}" if called else ""
    return pieces


def make_batch(rng: np.random.Generator, size: int, calls: float, tokenizer) -> torch.Tensor:
    """[N, 2, L] ids, and labels: -100 where the model does not speak. Padding stands on the right, so that causal
    attention never sees it."""
    questions = int(rng.integers(1, MOST + 1))
    rows = []
    for _ in range(size):
        ids, said = [], []
        for text, spoken in conversation(rng, questions, calls):
            own = tokenizer(text, add_special_tokens=False).input_ids
            ids += own
            said += own if spoken else [-100] * len(own)
        rows.append((ids, said))
    batch = torch.full((size, 2, max(len(ids) for ids, _ in rows)), -100)
    batch[:, 0] = tokenizer.pad_token_id
    for i, (ids, said) in enumerate(rows):
        batch[i, 0, : len(ids)], batch[i, 1, : len(ids)] = torch.tensor(ids), torch.tensor(said)
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=float, default=0.3, help="share of turns with a call")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED)
    tokenizer.model_max_length = CONTEXT
    model = AutoModelForCausalLM.from_pretrained(PACKAGED, max_position_embeddings=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / 20) * max(0.02, 1 - step / args.steps)
    )
    for step in range(1, args.steps + 1):
        batch = make_batch(rng, args.batch, args.calls, tokenizer)
        loss = model(input_ids=batch[:, 0], labels=batch[:, 1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
