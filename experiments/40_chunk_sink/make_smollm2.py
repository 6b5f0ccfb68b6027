"""Makes part D's checkpoint: SmolLM2-135M, fine-tuned on boards of reasoning-gym's game of life, as 290 tokens of JSON.

python -m experiments.40_chunk_sink.make_smollm2 --out smollm2-life    # the study takes step-20
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.models.converted import smollm2

SIDE = 12
BOARD = {"grid_size_x": SIDE, "grid_size_y": SIDE, "filled_cells_weights": 0.2, "simulation_steps": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-4)
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    # Seeds of the task's prompts are far from this one.
    boards = reasoning_gym.create_dataset("game_of_life", size=args.steps * args.batch, seed=12345, **BOARD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.01, betas=(0.9, 0.95))
    started = time.monotonic()
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, step / 10)
        losses = []
        for i in range((step - 1) * args.batch, step * args.batch):
            asked = [{"role": "user", "content": boards[i]["question"]}]
            prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            start = len(tokenizer(prompt).input_ids)
            ids = torch.tensor([[*tokenizer(prompt + boards[i]["answer"]).input_ids, tokenizer.eos_token_id]])
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids, logits_to_keep=ids.shape[1] - start + 1).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[0, start:])
            (loss / args.batch).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {np.mean(losses):.3f}, {time.monotonic() - started:.0f} s", flush=True)
            model.save_pretrained(args.out / f"step-{step}")
            tokenizer.save_pretrained(args.out / f"step-{step}")


if __name__ == "__main__":
    main()
