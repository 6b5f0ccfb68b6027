"""Published seconds an iteration against the call graph's: five named coefficients with physical bounds, fitted to some
cells and judged on others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from asyncrlhf.planner.callgraph import PPO, Graph, Layout
from asyncrlhf.planner.costs import Coefficients
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


def phases(cell: Cell, cluster: Cluster, coefficients: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each call in the paper's heuristic plan: all calls on all devices, tensor parallel inside a node and
    pipeline parallel between nodes. An iteration is their sum, for no two of them overlap on one mesh."""
    large = _SETTINGS[cell.setting] or ("actor", "reference", "critic", "reward")
    models = ("actor", "reference", "critic", "reward")
    shapes = {model: LLAMA_2[cell.size if model in large else "7B"] for model in models}
    share = coefficients["link"]
    slowed = replace(
        cluster,
        nodes=cell.gpus // cluster.per_node,
        intra=Link(cluster.intra.latency, cluster.intra.bandwidth * share),
        inter=Link(cluster.inter.latency, cluster.inter.bandwidth * share),
    )
    fitted = Coefficients(**{name: value for name, value in coefficients.items() if name != "link"})
    graph = Graph(shapes, slowed, cell.prompt, cell.response, cell.batch, fitted=fitted)
    layout = Layout(0, cell.gpus, cell.gpus // cluster.per_node, cluster.per_node)
    return {call.name: graph.seconds(call, layout) for call in PPO}


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
