"""Attention by layer and key-value head over one right answer of the study's task, with the chunks that are found.

python -m experiments.40_chunk_sink.pictures --model tiny-ledger/step-600 [--digits 58391274] [--chunks 16]
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import matplotlib
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrlhf.engines.cache_config import CacheConfig

ledger = import_module("experiments.40_chunk_sink.ledger")
matplotlib.use("Agg")
HERE = Path(__file__).parent


def boundaries(attention: np.ndarray, half: int) -> np.ndarray:
    """Scores [L] of each place as the beginning of a chunk, from attention [L, L] of queries over keys: what the engine
    adds up while it decodes (``KeptGroup._add_boundaries``)."""
    scores = np.zeros(len(attention))
    for query, row in enumerate(attention):
        for place in range(max(0, query - half + 1), query + 1):
            within, across = row[place : query + 1].sum(), row[max(0, place - half) : place].sum()
            scores[place] += (within - across) / (within + across + 1e-6)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--digits", default="58391274")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--out", type=Path, default=HERE / "attention.png")
    args = parser.parse_args()
    from matplotlib import pyplot

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="eager").eval()
    prompt = args.digits + "="
    ids = tokenizer(prompt + ledger.answer(args.digits)).input_ids
    words = [tokenizer.decode([i]) for i in ids]
    with torch.no_grad():
        layers = model(torch.tensor([ids]), output_attentions=True).attentions
    heads, half = model.config.num_key_value_heads, CacheConfig("chunk_sink").half
    figure, axes = pyplot.subplots(len(layers), heads, figsize=(7 * heads, 7 * len(layers)), squeeze=False)
    for layer, attention in enumerate(layers):
        grouped = attention[0].unflatten(0, (heads, -1)).mean(1).numpy()
        for head, axis in enumerate(axes[layer]):
            scores = boundaries(grouped[head], half)
            scores[: len(prompt)] = -np.inf
            found = np.sort(np.argsort(-scores)[: args.chunks])
            axis.imshow(np.sqrt(grouped[head]), cmap="Greys", vmin=0, vmax=1)
            for start, stop in zip(found, [*found[1:], len(ids)], strict=True):
                axis.plot([start - 0.5, start - 0.5, stop - 0.5], [stop - 0.5, start - 0.5, start - 0.5], "C3", lw=0.8)
            axis.set_xticks(range(len(ids)), words, fontsize=5)
            axis.set_yticks(range(len(ids)), words, fontsize=5)
            axis.set_title(f"layer {layer}, key-value head {head}", fontsize=9)
            said = [f"|{word}" if i in found else word for i, word in enumerate(words)]
            print(f"layer {layer} head {head}: {''.join(said)}")
    figure.tight_layout()
    figure.savefig(args.out, dpi=70)


if __name__ == "__main__":
    main()
