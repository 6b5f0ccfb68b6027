"""What a sweep's jobs occupy of this machine, and which of its GPUs each local job gets."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
EPSILON = 1e-6


def needs(config: RunConfig) -> tuple[float, float]:
    """(CPUs, GPUs) that a job occupies. On Ray the sum of its parts'. A local run is one process on one core, whose
    parts share the first GPU; only an engine of several workers uses more."""
    from asyncrlhf.cluster.parts import parts_of, placement_plan, specs  # some seconds of imports

    plan = placement_plan(config)
    if config.runtime == "local":
        widest = max(part.gpus for part in parts_of(specs(config, config.weights), config.cluster))
        return 1.0, min(plan.total("GPU"), max(1.0, widest))
    return max(plan.total("CPU"), 1.0), plan.total("GPU")


class Devices:
    """This machine's GPUs. ``count``: those that Ray's jobs may occupy, a cluster's among them. A local job takes its
    own by name, since a process without a choice would use the first one."""

    def __init__(self, names: Sequence[str] = (), count: float | None = None) -> None:
        self.count = float(len(names)) if count is None else count
        self._room = dict.fromkeys(names, 1.0)

    @classmethod
    def of(cls, configs: Sequence[RunConfig]) -> Devices:
        """The GPUs that are visible to this process, read only if a job asks for one. Raises ConfigError if a job asks
        for more."""
        asked = [(needs(config)[1], config.runtime == "ray" and config.ray.cluster) for config in configs]
        if not any(gpus for gpus, _ in asked):
            return cls()
        import torch

        found, most = torch.cuda.device_count(), max((gpus for gpus, elsewhere in asked if not elsewhere), default=0.0)
        if most > found:
            raise ConfigError(f"a job of the sweep asks for {most:g} GPUs; torch sees {found} on this machine.")
        outer = os.environ.get(VISIBLE, "")
        names = outer.split(",") if outer.strip() else map(str, range(found))
        return cls([name.strip() for name in names][:found], max(float(found), *(gpus for gpus, _ in asked)))

    def fit(self, gpus: float) -> bool:
        return bool(self._choose(gpus)) or not gpus

    def take(self, gpus: float) -> tuple[str, ...]:
        """Occupy and name the devices of a local job: whole ones, or a share of one. Empty for a job without GPUs."""
        chosen = self._choose(gpus)
        for name in chosen:
            self._room[name] -= min(gpus, 1.0)
        return chosen

    def free(self, names: Sequence[str], gpus: float) -> None:
        """The end of the job that took ``names``."""
        for name in names:
            self._room[name] += min(gpus, 1.0)

    def _choose(self, gpus: float) -> tuple[str, ...]:
        """The fullest device with room enough for a share, the first free ones otherwise; empty if there are none."""
        fitting = [name for name, room in self._room.items() if room >= min(gpus, 1.0) - EPSILON]
        if gpus < 1:
            fitting.sort(key=lambda name: self._room[name])
        count = math.ceil(gpus - EPSILON)
        return tuple(fitting[:count]) if len(fitting) >= count else ()
