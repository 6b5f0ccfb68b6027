"""One GPU's memory divided between a learner at work and engines: what is derived fits, is said, and covers what a
learner really holds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrlhf.bench.checkpoint import batch, build
from asyncrlhf.cluster.one_gpu import beside_the_learner, learner_needs
from asyncrlhf.cluster.parts import build_runtime, specs
from asyncrlhf.config.compose import load_config
from asyncrlhf.engines.vllm.memory_share import CONTEXT_BYTES, with_share
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.learner_config import BackendSpec
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.orchestrator import run as run_module
from asyncrlhf.orchestrator.start import preflight
from asyncrlhf.transport.build_transport import build_sender

GB = 10**9
BIG = ("generator.engine=vllm", "model.dtype=bfloat16", "learner.mixed_precision=bfloat16")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A machine with one GPU of these bytes."""
    size = {"total": 80 * GB}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=size["total"]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (size["total"] - 2 * GB, size["total"]))
    return size


@pytest.mark.in_turn
@pytest.mark.parametrize("precision", ["none", "bfloat16"])
@pytest.mark.parametrize("shape", ["2m", "20m"])
@pytest.mark.more_but("2m")
@pytest.mark.thorough_but("none")
def test_the_learner_holds_no_more_than_it_is_said_to_need(shape: str, precision: str, tmp_path: Path) -> None:
    model, tokens = build(shape), 512
    model.save_pretrained(tmp_path)
    words = [f"model.path={tmp_path}", f"learner.token_budget={tokens}", f"learner.mixed_precision={precision}"]
    config = load_config([*words, "generator.max_completion_length=16", "weights.dtype=bfloat16"])
    needs = learner_needs(config)
    learner = TorchBackend(model, BackendSpec(learner=config.learner, algorithm=config.algorithm, steps=10))
    own, kept = {p.data_ptr() for p in model.parameters()}, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.train_step(batch(shape, tokens))
    weights = sum(p.nbytes for p in model.parameters())
    copies = weights // 2 if precision == "bfloat16" else 0
    assert needs["weights"] == weights + copies
    states = [value for o in learner.updater.optimizers for state in o.state.values() for value in state.values()]
    held = weights + sum(v.nbytes for v in states if isinstance(v, torch.Tensor))  # with the gradients
    assert held == pytest.approx(needs["gradients and optimizer"], rel=1e-3)
    passes = needs["activations"] + needs["logits"] + copies
    assert 0.4 * passes < sum(kept.values()) <= passes, (sum(kept.values()), needs)
    sender = build_sender(config.weights, "ray", dict(model.named_parameters()))
    assert sum(sender.manifest.bucket_bytes) == pytest.approx(needs["the copy that generators load"], rel=1e-2)
    sender.close()


@pytest.mark.in_turn
@pytest.mark.parametrize(("replicas", "total"), [(1, 24), (1, 80), (2, 80), (3, 141)])
@pytest.mark.more_but(every=3)
def test_all_parts_fit_on_the_card_together_and_leave_little(
    replicas: int, total: int, card: dict[str, int], tmp_path: Path
) -> None:
    card["total"] = total * GB
    build("135m").config.save_pretrained(tmp_path)
    words = [f"generator.replicas={replicas}", f"generator.gpus={0.5 / replicas}", f"model.path={tmp_path}"]
    config = load_config(["cluster=one_gpu", *BIG, *words])
    runtime: Any = build_runtime(config)
    shares = [
        with_share(s.generator, s.model, s.name, s.beside_bytes, s.part_of_rest).vllm.gpu_memory_utilization
        for s in runtime._specs.generators
    ]
    contexts = replicas * CONTEXT_BYTES
    rest = total * GB * (1 - sum(map(float, filter(None, shares)))) - sum(learner_needs(config).values()) - contexts
    assert len(set(shares)) == 1 and 0 <= rest <= 0.06 * total * GB


def test_shares_of_other_sizes_divide_what_the_learner_leaves() -> None:
    groups = "generator.groups={a:{gpus:0.1,replicas:2},b:{gpus:0.4,replicas:1}}"
    config = load_config(["cluster=one_gpu", "learner.gpus=0.4", groups])
    found = beside_the_learner(specs(config, config.weights), {"all": 5.0})
    assert [round(spec.part_of_rest, 3) for spec in found.generators] == [0.167, 0.167, 0.667]
    assert {spec.beside_bytes for spec in found.generators} == {5 + 2 * CONTEXT_BYTES}


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_start_says_in_one_line_who_may_take_what(engine: str, card: dict[str, int]) -> None:
    words = ["cluster=one_gpu", f"generator.engine={engine}", "generator.replicas=2", "generator.gpus=0.25"]
    (said,) = preflight.gpu_notes(load_config(words))
    assert said.startswith("One GPU of 80.0 GB for all at once: the learner 0.2 GB (weights 0.003 GB, ")
    assert said.count("GB for its key-value cache") == 2 and "generator-1 36." in said and "\n" not in said
    (said,) = preflight.gpu_notes(load_config([*words, "generator.vllm.gpu_memory_utilization=0.1"]))
    assert ("generator-1 8.0 GB" in said) == (engine == "vllm")


def test_the_line_is_a_note_of_the_run_and_what_cannot_fit_is_refused_before_it(card: dict[str, int]) -> None:
    assert any("for all at once" in note for note in run_module.prepare(load_config(["cluster=one_gpu"])).notes)
    with pytest.raises(
        ConfigError, match=r"^generator-0 works beside a learner that needs 3\d\.\d of 4\.0 GB .*flatten"
    ):
        card["total"] = 4 * GB
        run_module.prepare(load_config(["cluster=one_gpu", "learner.token_budget=1000000"]))


def test_a_machine_without_a_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"learner-0 needs 1 GPU \+ 2 CPUs .* torch sees 0 on this machine"):
        run_module.prepare(load_config(["cluster=one_gpu"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "1 GPU is here, and this run uses none: cluster=one_gpu puts learner and generators on one."),
        (("learner.gpus=1",), ""),
        (("ray.address=head:1",), ""),
        (("reward.gpus=1",), ""),
    ],
)
def test_an_unused_gpu_is_named_with_the_way_to_use_it(words: tuple[str, ...], said: str, card: dict[str, int]) -> None:
    found = preflight.gpu_notes(load_config([*words]))
    assert "".join(found) == said
