"""Attention by layer and key-value head over one answer, with the chunks that are found.

python -m experiments.40_chunk_sink.pictures --model tiny-ledger/step-600 [--chunks 16]    # attention.png
python -m experiments.40_chunk_sink.pictures --model smollm2 --layers 1 5 9 --out attention_smollm2.png
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.engines.cache_config import CacheConfig
from asyncrlhf.models.converted import smollm2
from asyncrlhf.tasks.build_task import build_task

ledger = import_module("experiments.40_chunk_sink.ledger")
matplotlib.use("Agg")
HERE = Path(__file__).parent
DIGITS = "58391274"


def boundaries(attention: np.ndarray, half: int) -> np.ndarray:
    """Scores [L] of each place as the beginning of a chunk, from attention [L, L] of queries over keys: what the engine
    adds up while it decodes (``KeptGroup._add_boundaries``)."""
    scores = np.zeros(len(attention))
    for query, row in enumerate(attention):
        for place in range(max(0, query - half + 1), query + 1):
            within, across = row[place : query + 1].sum(), row[max(0, place - half) : place].sum()
            scores[place] += (within - across) / (within + across + 1e-6)
    return scores


def written(model: Any, tokenizer: Any) -> tuple[list[int], int]:
    """Tokens of a right ledger, or, of a larger model, of a question in words with the model's own greedy answer; and
    how many of them are the prompt."""
    if model.config.num_hidden_layers < 10:
        prompt = DIGITS + "="
        return tokenizer(prompt + ledger.answer(DIGITS)).input_ids, len(prompt)
    large = import_module("experiments.40_chunk_sink.smollm2")
    asked = build_task(large.task_of("words"), tokenizer).heldout()[1].token_ids
    ids = model.generate(torch.tensor(asked)[None], max_new_tokens=96, do_sample=False, repetition_penalty=1.1)
    return ids[0].tolist(), len(asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int, nargs="+", help="only these")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--out", type=Path, default=HERE / "attention.png")
    args = parser.parse_args()
    from matplotlib import pyplot

    folder = str(smollm2()) if args.model == "smollm2" else args.model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        ids, asked = written(model, tokenizer)
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    words = [tokenizer.decode([i]) for i in ids]
    layers = args.layers or range(len(attentions))
    heads, half = model.config.num_key_value_heads, CacheConfig("chunk_sink").half
    # A long prompt is left out: it always stays, and the answer is what is cut into chunks.
    first = asked if asked > 20 else 0
    size = len(ids) - first
    figure, axes = pyplot.subplots(len(layers), heads, figsize=(7 * heads, 7 * len(layers)), squeeze=False)
    for layer, row in zip(layers, axes, strict=True):
        grouped = attentions[layer][0].unflatten(0, (heads, -1)).mean(1).numpy()
        for head, axis in enumerate(row):
            scores = boundaries(grouped[head], half)
            scores[:asked] = -np.inf
            found = np.sort(np.argsort(-scores)[: args.chunks])
            axis.imshow(np.sqrt(grouped[head][first:, first:]), cmap="Greys", vmin=0, vmax=1)
            for start, stop in zip(found - first, [*found[1:] - first, size], strict=True):
                axis.plot([start - 0.5, start - 0.5, stop - 0.5], [stop - 0.5, start - 0.5, start - 0.5], "C3", lw=0.8)
            axis.set_xticks(range(size), words[first:], fontsize=5, rotation=90 if first else 0)
            axis.set_yticks(range(size), words[first:], fontsize=5)
            axis.set_title(f"layer {layer}, key-value head {head}", fontsize=9)
            said = [f"|{word}" if i in found else word for i, word in enumerate(words)]
            print(f"layer {layer} head {head}: {''.join(said[first:])}")
    figure.tight_layout()
    figure.savefig(args.out, dpi=70)


if __name__ == "__main__":
    main()
