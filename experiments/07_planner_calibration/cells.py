"""Published seconds an iteration against those of its calls: five named coefficients with physical bounds, fitted to
some cells and judged on others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from asyncrlhf.planner.costs import Coefficients, CostModel, all_reduce, forward_flops
from asyncrlhf.planner.shapes import Cluster, Link, ModelShape

LLAMA_2 = {
    "7B": ModelShape(32, 4096, 11008, 32000, 32, 32, 128),
    "13B": ModelShape(40, 5120, 13824, 32000, 40, 40, 128),
    "34B": ModelShape(48, 8192, 22016, 32000, 64, 8, 128),
    "70B": ModelShape(80, 8192, 28672, 32000, 64, 8, 128),
}
# (lowest, highest, first guess): shares of a device's peaks are over 0 and at most 1, seconds are not negative.
BOUNDS: Mapping[str, tuple[float, float, float]] = {
    "compute": (0.05, 1.0, 0.4),  # of peak FLOP/s
    "memory": (0.05, 1.0, 0.6),  # of the memory's bandwidth
    "link": (0.02, 1.0, 0.5),  # of the links' bandwidth
    "layer": (0.0, 3e-3, 1e-3),  # the host's seconds to launch one layer's kernels, without CUDA graphs
    "hop": (0.0, 2e-2, 5e-4),  # seconds from one pipeline stage to the next, beside those of the bytes
}


@dataclass(frozen=True)
class Cell:
    """One published figure. ``setting``: which models have ``size``, ``actor`` (and reference), ``critic`` (and reward)
    or ``both``; the others are of 7B. ``seconds`` may be missing where only a prediction is asked for."""

    setting: str
    size: str
    response: int
    batch: int
    gpus: int
    seconds: float = float("nan")
    prompt: int = 128

    @property
    def name(self) -> str:
        return f"{self.setting} {self.size} g{self.response}"


def read_cells(path: Path) -> list[Cell]:
    """Raises ValueError with one sentence for a file that holds none, or one twice."""
    try:
        cells = [Cell(**row) for row in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        unknown = [cell.name for cell in cells if cell.size not in LLAMA_2 or cell.setting not in _SETTINGS]
        if unknown:
            raise ValueError(f"{unknown[0]} is not a cell; allowed: {', '.join(_SETTINGS)} and {', '.join(LLAMA_2)}")
        if len({cell.name for cell in cells}) < len(cells):
            raise ValueError("a cell stands there twice")
        return cells
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no calibration cells: {error}.") from error


_SETTINGS = {"actor": ("actor", "reference"), "critic": ("critic", "reward"), "both": ()}


# One PPO iteration: each call's model, and what it does. No two calls overlap, for each has all devices.
PPO = {
    "generation": ("actor", "generate"),
    **{model: (model, "infer") for model in ("reward", "reference", "critic")},
    "actor training": ("actor", "train"),
    "critic training": ("critic", "train"),
}
MINIBATCHES = 4  # updates per iteration, one after the other, as in ReaL's example of PPO


def phases(cell: Cell, cluster: Cluster, coefficients: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each call in the paper's heuristic plan: all calls on all devices, tensor parallel inside a node and
    pipeline parallel between nodes. An iteration is their sum."""
    large = _SETTINGS[cell.setting] or ("actor", "reference", "critic", "reward")
    share = coefficients["link"]
    slowed = replace(
        cluster,
        nodes=cell.gpus // cluster.per_node,
        intra=Link(cluster.intra.latency, cluster.intra.bandwidth * share),
        inter=Link(cluster.inter.latency, cluster.inter.bandwidth * share),
    )
    fitted = Coefficients(**{name: value for name, value in coefficients.items() if name != "link"})
    return {
        name: _call_seconds(kind, LLAMA_2[cell.size if model in large else "7B"], cell, slowed, fitted)
        for name, (model, kind) in PPO.items()
    }


def _call_seconds(kind: str, shape: ModelShape, cell: Cell, cluster: Cluster, fitted: Coefficients) -> float:
    """Seconds of one call by ReaL's terms: 2p micro-batches in training and inference, p in generation."""
    p, length = cluster.nodes, cell.prompt + cell.response
    if kind == "generate":
        model = CostModel(shape, cluster, tensor=cluster.per_node, pipeline=p, fitted=fitted)
        contexts = cell.prompt + cell.response * (np.arange(4) + 0.5) / 4  # the context grows
        token = float(np.mean([model.decode(cell.batch, context) for context in contexts]))
        return _stage_seconds(shape, cluster, fitted, cell.batch / p, cell.prompt) * (2 * p - 1) + token * (
            cell.response - 1
        )
    m = 2 * p
    if kind == "infer":
        return _stage_seconds(shape, cluster, fitted, cell.batch / m, length) * (p + m - 1)
    # Four passes' compute and three passes' all-reduces: training repeats the forward pass.
    stage = _stage_seconds(shape, cluster, fitted, cell.batch / (m * MINIBATCHES), length, work=4, talk=3)
    update = 16.0 * shape.parameters / (cluster.devices * cluster.device.bandwidth * fitted.memory)
    return MINIBATCHES * (stage * (p + m - 1) + update)


def _stage_seconds(
    shape: ModelShape, cluster: Cluster, fitted: Coefficients, rows: float, length: int, work: int = 1, talk: int = 1
) -> float:
    """Seconds of one micro-batch of ``rows`` sequences in one stage: ``work`` times the compute of a forward pass plus
    ``talk`` times its all-reduces over the tensor-parallel ranks, or the host's launches if they take longer."""
    p, t = cluster.nodes, cluster.per_node
    compute = rows * forward_flops(shape, [length]) / (p * t * cluster.device.flops * fitted.compute)
    size, layers = 2.0 * rows * length * shape.hidden, shape.layers / p
    sums = 2 * all_reduce(cluster.link(t), t, size)
    hop = size / t / cluster.inter.bandwidth + fitted.hop if p > 1 else 0.0
    return max(work * compute + talk * (layers * sums + hop), work * layers * fitted.layer)


def predict(cell: Cell, cluster: Cluster, coefficients: Mapping[str, float]) -> float:
    return sum(phases(cell, cluster, coefficients).values())


def fit_cells(cells: Sequence[Cell], cluster: Cluster) -> dict[str, float]:
    """The coefficients within BOUNDS that make the relative errors smallest, by least squares of their logarithms."""
    low, high, first = np.array(list(BOUNDS.values())).T
    scale = np.where(high > 1e-1, 1.0, high)

    def errors(values: np.ndarray) -> np.ndarray:
        given = dict(zip(BOUNDS, values * scale, strict=True))
        return np.array([np.log(predict(cell, cluster, given) / cell.seconds) for cell in cells])

    found = least_squares(errors, first / scale, bounds=(low / scale, high / scale))
    return {name: float(value) for name, value in zip(BOUNDS, found.x * scale, strict=True)}


def leave_one_out(cells: Sequence[Cell], cluster: Cluster) -> list[float]:
    """Each cell's prediction by coefficients that were fitted to all others."""
    return [predict(cell, cluster, fit_cells([c for c in cells if c is not cell], cluster)) for cell in cells]
