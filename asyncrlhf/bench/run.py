"""``asyncrlhf bench NAME``: picks the benchmark; each alternates what it compares within one call."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from asyncrlhf.errors import ConfigError


def _overlap(arguments: Sequence[str]) -> object:
    from asyncrlhf.bench import overlap

    return overlap.run(arguments)


def _trl(arguments: Sequence[str]) -> object:
    from asyncrlhf.bench import trl

    return trl.run(arguments)


def _weights(arguments: Sequence[str]) -> object:
    from asyncrlhf.bench import weights

    return weights.run(arguments)


def _straggler(arguments: Sequence[str]) -> object:
    from asyncrlhf.bench import straggler

    return straggler.run(arguments)


def _generation(arguments: Sequence[str]) -> object:
    from asyncrlhf.bench import generation

    return generation.run(arguments)


def _replicas(arguments: Sequence[str]) -> object:
    from asyncrlhf.bench import replicas

    return replicas.run(arguments)


def _fusion(arguments: Sequence[str]) -> object:
    from asyncrlhf.bench import fusion

    return fusion.run(arguments)


def _control_plane(arguments: Sequence[str]) -> object:
    from asyncrlhf.bench import control_plane

    return control_plane.run(arguments)


BENCHMARKS: dict[str, Callable[[Sequence[str]], object]] = {
    "overlap": _overlap,
    "trl": _trl,
    "weights": _weights,
    "straggler": _straggler,
    "replicas": _replicas,
    "generation": _generation,
    "fusion": _fusion,
    "control_plane": _control_plane,
}


def main(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else ""
    if name not in BENCHMARKS:
        close = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"{name or 'nothing'} is no benchmark{hint}; allowed: {', '.join(BENCHMARKS)}.")
    BENCHMARKS[name](arguments[1:])
    return 0
