"""The findings of `asyncrlhf doctor` on the run's model: which way learner and engine will take, or why they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrlhf.doctor.parts import Finding, engines
from asyncrlhf.errors import ConfigError

if TYPE_CHECKING:  # these import torch, which may not import here
    from asyncrlhf.config.run_config import RunConfig
    from asyncrlhf.doctor.model_ways import Way

LEARNER, ENGINE = "learner and model", "hf engine and model"


def ways(config: RunConfig) -> list[Finding]:
    """By a small random model of the checkpoint's config; no weights are read. Empty for the packaged model, which
    the tests cover."""
    if config.model.path == "tiny":
        return []
    import torch

    from asyncrlhf.doctor.model_ways import engine_way, learner_way
    from asyncrlhf.models.checkpoint_folder import load_shape
    from asyncrlhf.models.miniature import build_miniature

    try:
        model = build_miniature(load_shape(config.model))
    except ConfigError as error:
        return [Finding(LEARNER, config.model.path, "fails", str(error))]
    trained: dict[str, torch.Tensor] = {}
    found = [_finding(LEARNER, learner_way(model, trained), f"model.path={config.model.path} cannot be trained")]
    if "hf" in engines(config):
        cannot = f"generator.engine=hf cannot sample from model.path={config.model.path}"
        found.append(_finding(ENGINE, engine_way(model, trained), cannot))
    return found


def _finding(what: str, way: Way, cannot: str) -> Finding:
    if way.refused:
        return Finding(what, way.name, "fails", f"{cannot}: {way.why}")
    return Finding(what, way.name, "note" if way.why else "good", way.why)
