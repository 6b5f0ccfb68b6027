"""Inputs of a prediction: the shape of a model, devices and their links (by name: data-sheet peaks), and lengths."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import CensoredData, ecdf

FILE = Path(__file__).with_name("devices.json")
LATENCY, FAR_LATENCY = 5e-6, 1e-5  # seconds per message inside a node and between nodes
QUANTILES = (np.arange(20_000) + 0.5) / 20_000


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family. ``bias``: the query, key and value projections have biases."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_width: int
    tied: bool = False
    bias: bool = False

    @classmethod
    def from_config(cls, path: Path) -> ModelShape:
        """From a checkpoint's ``config.json``. Raises ValueError with one sentence if it is not a dense decoder."""
        try:
            given: Mapping[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
            hidden, heads = int(given["hidden_size"]), int(given["num_attention_heads"])
            if any("expert" in key for key in given):
                raise ValueError("a mixture of experts; the planner supports dense decoders only")
            return cls(
                layers=int(given["num_hidden_layers"]),
                hidden=hidden,
                intermediate=int(given["intermediate_size"]),
                vocabulary=int(given["vocab_size"]),
                heads=heads,
                kv_heads=int(given.get("num_key_value_heads") or heads),
                head_width=int(given.get("head_dim") or hidden // heads),
                tied=bool(given.get("tie_word_embeddings", False)),
                bias=bool(given.get("attention_bias", given.get("model_type") == "qwen2")),
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}/config.json does not describe a supported model: {error}.") from error

    @property
    def block_parameters(self) -> int:
        """Parameters of one layer, including its two norms."""
        query, key = self.heads * self.head_width, self.kv_heads * self.head_width
        biases = (query + 2 * key) * self.bias
        return self.hidden * (2 * query + 2 * key + 3 * self.intermediate + 2) + biases

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.block_parameters + embeddings + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes per token of context in bfloat16: keys and values of all layers."""
        return 4 * self.layers * self.kv_heads * self.head_width


@dataclass(frozen=True)
class Link:
    """``latency`` in seconds per message, ``bandwidth`` in bytes per second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """``flops``: peak FLOP/s in bfloat16; ``bandwidth``: of the memory, in bytes per second; ``memory``: in bytes;
    ``source``: where the figures come from."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    source: str = "given"


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of ``per_node`` equal devices, linked inside a node and between nodes."""

    device: Device
    nodes: int
    per_node: int
    intra: Link
    inter: Link

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def link(self, ranks: int) -> Link:
        """The slowest link in a ring of ``ranks`` ranks that fill one node after another."""
        return self.intra if ranks <= self.per_node else self.inter


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens: prompts of ``prompt``; responses log-normal with ``mean`` and coefficient of variation ``cv``,
    at most ``longest``, or drawn from the recorded ``lengths`` if given. The cache holds at most ``kept`` of each.
    """

    prompt: float
    mean: float
    cv: float
    longest: int
    lengths: tuple[int, ...] = ()
    kept: float = math.inf

    @classmethod
    def from_lengths(cls, prompt: float, lengths: Sequence[int], cut: Sequence[int] = (), longest: int = 0) -> Workload:
        """From recorded response lengths. Responses that were cut short at the lengths ``cut`` count by Kaplan and
        Meier's estimate: each as one of the longer ones, or of ``longest`` tokens if none is longer."""
        if not len(lengths):
            raise ValueError("a workload needs at least one recorded length.")
        if len(cut):
            whole = ecdf(CensoredData(uncensored=list(lengths), right=list(cut))).cdf
            ordered = np.append(whole.quantiles, max(longest, *lengths, *cut))
            lengths = ordered[np.searchsorted(whole.probabilities, QUANTILES)].astype(int).tolist()
        mean = float(np.mean(lengths))
        return cls(prompt, mean, float(np.std(lengths)) / mean, int(max(lengths)), tuple(map(int, lengths)))

    def length(self, seed: int) -> int:
        """The response length in tokens of the request with this seed."""
        rng = random.Random(seed)
        if self.lengths:
            return self.lengths[rng.randrange(len(self.lengths))]
        s = spread(self.cv)
        return min(max(1, round(self.mean * math.exp(s * rng.gauss(0.0, 1.0) - s**2 / 2))), self.longest)

    def longest_of(self, siblings: int) -> float:
        """The expected longest of ``siblings`` responses divided by the mean: M in the closed forms."""
        if self.lengths:
            ordered = np.quantile(np.asarray(self.lengths, dtype=float), QUANTILES ** (1 / siblings))
            return float(ordered.mean() / self.mean)
        return min(longest_of(1.0, self.cv, siblings), self.longest / self.mean)


def spread(cv: float) -> float:
    """The standard deviation of the logarithm of a log-normal with this coefficient of variation."""
    return math.sqrt(math.log1p(cv**2))


def longest_of(mean: float, cv: float, count: int) -> float:
    """The expected largest of ``count`` log-normal draws, by the integral over their quantiles.

    The asymptotic ``mean exp(s sqrt(2 ln count) - s^2 / 2)`` is 25 to 43% too high for the counts that occur.
    """
    s = spread(cv)
    return float(np.mean(mean * np.exp(s * ndtri(QUANTILES ** (1 / count)) - s**2 / 2)))


def catalogue() -> dict[str, dict[str, Any]]:
    """The rows of devices.json by name."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: row for name, row in rows.items() if name != "note"}


def cluster_of(name: str, devices: int) -> Cluster:
    """A cluster of ``devices`` of a named device: one node or several full ones. Raises ValueError (one sentence)."""
    per_node = min(_row(name)["per_node"], devices)
    if devices < 1 or devices % per_node:
        raise ValueError(f"{devices} devices do not fill nodes of {per_node}; allowed: fewer, or a multiple.")
    return nodes_for(name, devices, per_node)


def nodes_for(name: str, devices: int, per_node: int = 0) -> Cluster:
    """The full nodes that ``devices`` need, with ``per_node`` devices each (0: the catalogue's number)."""
    row = _row(name)
    each = min(devices, per_node or row["per_node"])
    device = Device(name, row["flops"], row["bandwidth"], row["memory"], row["source"])
    links = Link(LATENCY, row["intra"]), Link(FAR_LATENCY, row["inter"])
    return Cluster(device, math.ceil(devices / each), each, *links)


def _row(name: str) -> dict[str, Any]:
    known = catalogue()
    if name not in known:
        raise ValueError(f"{name} is not a device of {FILE.name}; allowed: {', '.join(known)}.")
    return known[name]
