"""``learner.deterministic``: no step needs an operation that torch refuses on a GPU, and the state goes no further."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import deterministic as uninitialized
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrlhf.actors import model_annotators
from asyncrlhf.actors.model_annotators import ReferenceSpec, ReferenceWorker
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.fake import FakeEngine
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.deterministic import deterministic
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import LearnerConfig, ReferenceConfig
from asyncrlhf.learner.step.companions import RolloutPasses
from asyncrlhf.learner.step.user_loss import LossInputs
from asyncrlhf.learner.torch_backend import TorchBackend
from tests.loop import FAKE, run
from tests.pretended_gpu import CardTensor, Counts, learner_on_gpu
from tests.unit.learner.test_presets import LONGEST, PRESETS, preset, stale_batch
from tests.unit.learner.worlds import backend, llama

HERE = __name__
# What torch's documentation names under "will throw a RuntimeError", by the operations that its dispatcher sees.
REFUSED = {
    "nn.AvgPool3d": "avg_pool3d_backward",
    "nn.AdaptiveAvgPool2d": "_adaptive_avg_pool2d_backward",
    "nn.AdaptiveAvgPool3d": "_adaptive_avg_pool3d_backward",
    "nn.AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
    "nn.MaxPool3d": "max_pool3d_with_indices_backward",  # not in every version
    "nn.FractionalMaxPool2d": "fractional_max_pool2d_backward",
    "nn.FractionalMaxPool3d": "fractional_max_pool3d_backward",
    "nn.MaxUnpool1d": "max_unpool2d",
    "nn.MaxUnpool2d": "max_unpool2d",
    "nn.MaxUnpool3d": "max_unpool3d",
    "nn.functional.interpolate": "upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
    "upsample_trilinear3d_backward",
    "nn.ReflectionPad1d": "reflection_pad1d_backward",
    "nn.ReflectionPad2d": "reflection_pad2d_backward",
    "nn.ReflectionPad3d": "reflection_pad3d_backward",
    "nn.NLLLoss": "nll_loss_forward nll_loss2d_forward",
    "nn.CTCLoss": "_ctc_loss_backward",
    "nn.EmbeddingBag": "_embedding_bag_backward _embedding_bag_dense_backward",
    "Tensor.put_": "put_ put",
    "histc": "histc",
    "bincount": "bincount",  # with weights
    "median": "median nanmedian",  # with indices
    "nn.functional.grid_sample": "grid_sampler_2d_backward grid_sampler_3d_backward",
    "cumsum": "cumsum cumsum_",  # of floats
    "Tensor.scatter_reduce": "scatter_reduce scatter_reduce_",  # a product
    "Tensor.resize_": "resize_",  # of a quantized tensor
}
NAMES = {name for names in REFUSED.values() for name in names.split()}
# Presets that between them have every part of a step: a critic, a slow copy, pairs, a regression, gates.
APART = ("m2po", "ppo", "vcpo", "impact", "oapl", "online_dpo", "opsm")


def is_refused(name: str, overload: str, arguments: Sequence[Any], words: dict[str, Any]) -> bool:
    """Whether torch refuses the call under its flag if the tensors are on a GPU."""
    if name not in NAMES:
        return False
    if name == "bincount":
        return (len(arguments) > 1 and arguments[1] is not None) or words.get("weights") is not None
    if name in ("median", "nanmedian"):
        return "dim" in overload
    if name in ("cumsum", "cumsum_"):
        kind = words.get("dtype") or arguments[0].dtype
        return kind.is_floating_point or kind.is_complex
    if name.startswith("scatter_reduce"):
        return "prod" in arguments
    return name != "resize_" or bool(arguments[0].is_quantized)


class Refused(TorchDispatchMode):
    """Within this context: the operations of forward and backward passes that torch would refuse on a GPU. ``kind``: of
    the tensors that are looked at."""

    def __init__(self, kind: type[torch.Tensor] = torch.Tensor) -> None:
        super().__init__()
        self._kind = kind
        self.found: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = func.__name__.partition(".")
        flat = [
            given for x in (*args, *(kwargs or {}).values()) for given in (x if isinstance(x, list | tuple) else [x])
        ]
        if any(isinstance(given, self._kind) for given in flat):
            self.seen.add(name)
            if is_refused(name, overload, args, kwargs or {}):
                self.found.add(name)
        return func(*args, **(kwargs or {}))


def test_the_table_names_what_torch_documents() -> None:
    documented = (torch.use_deterministic_algorithms.__doc__ or "").partition("In addition, several operations")[0]
    documented = documented.rpartition("will throw a")[2]
    assert {"cumsum"} < set(re.findall(r"\* :\w+:`torch\.(\S+?)`", documented)) <= REFUSED.keys()


def test_the_recorder_sees_what_torch_refuses() -> None:
    x, places = torch.rand(5), torch.tensor([1, 0, 1])
    with Refused() as recorder:
        torch.cumsum(torch.arange(3), 0)
        torch.bincount(places)
        torch.zeros(2).scatter_reduce(0, places, x[:3], "sum")
        x.median()
    assert not recorder.found and recorder.seen >= {"cumsum", "bincount", "scatter_reduce", "median"}
    with Refused() as recorder:
        x.clone().requires_grad_().cumsum(0).sum().backward()
        torch.bincount(places, x[:3])
        torch.zeros(2).scatter_reduce(0, places, x[:3], "prod")
        x.median(0)
        x.put_(places, torch.ones(3))
        wide = torch.rand(1, 1, 4, requires_grad=True)
        torch.nn.functional.interpolate(wide, scale_factor=2.0, mode="linear").sum().backward()
    assert recorder.found == {
        "cumsum", "bincount", "scatter_reduce", "median", "put_", "upsample_linear1d_backward",
    }  # fmt: skip


LEARNERS: dict[str, tuple[dict[str, Any], str]] = {
    "bfloat16": ({"mixed_precision": "bfloat16"}, "_varlen_attn_backward"),
    "checkpoints": ({"gradient_checkpointing": True}, "_efficient_attention_backward"),
    "one at a time": ({"packing": False}, "_softmax_backward_data"),
}


def called_on_a_gpu(algorithm: AlgorithmConfig, learner: dict[str, Any]) -> tuple[set[str], Counts]:
    """What a step of some microbatches calls there, of which nothing is refused; and the counts of a second step."""

    config = LearnerConfig(**({"learning_rate": 1e-3, "token_budget": 40, "gpus": 1} | learner))
    models = [llama(seed).to("meta") for seed in (0, 5)[: 1 + algorithm.needs_reference]]
    given, of = stale_batch(groups=4, flat_groups=1), {"max_completion_length": LONGEST}
    with learner_on_gpu(models, algorithm, config, **of) as (gpu, trained):
        with deterministic(True), Refused(CardTensor) as recorder:
            trained.train_step(given)
        counts = gpu.fresh()
        trained.train_step(given)
    assert not recorder.found and recorder.seen >= {"mm", "embedding_dense_backward", "scatter_add_"}
    return recorder.seen, counts


@pytest.mark.in_turn
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but("m2po", "vcpo")
@pytest.mark.thorough_but(*APART)
def test_no_preset_needs_what_torch_refuses_on_a_gpu_or_has_the_host_wait_for_each_microbatch(name: str) -> None:
    algorithm = preset(name)
    _, counts = called_on_a_gpu(algorithm, {})
    updates = algorithm.num_iterations * algorithm.minibatches
    assert counts.waits <= 2 * updates + (algorithm.lr != "none"), counts.syncs  # that rate is known from the ESS


@pytest.mark.in_turn
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.more_but("bfloat16")
def test_nor_does_another_learner(name: str) -> None:
    learner, shown = LEARNERS[name]
    assert shown in called_on_a_gpu(AlgorithmConfig(), learner)[0]


def test_nor_does_muon() -> None:
    """On a CPU: on a pretended GPU no gradient is finite, which plain AdamW alone does not wait to know."""
    with deterministic(True), Refused() as recorder:
        left_by_a_step(AlgorithmConfig(), {"optim": "muon"})
    assert not recorder.found and recorder.seen >= {"lerp_", "addmm", "_fused_adamw_"}


@contextmanager
def filling() -> Iterator[None]:
    """Under the flag, with the memory of each new tensor set to NaN or to the largest integer."""
    with deterministic(True):
        uninitialized.fill_uninitialized_memory = True
        assert torch.empty(9).isnan().all()
        yield


def left_by_a_step(algorithm: AlgorithmConfig, learner: dict[str, Any]) -> dict[str, Any]:
    config = LearnerConfig(**({"learning_rate": 1e-3, "token_budget": 40} | learner))
    reference = llama(seed=5) if algorithm.needs_reference else None
    trained = backend(algorithm, config, reference=reference, max_completion_length=LONGEST)
    metrics = trained.train_step(stale_batch(flat_groups=1)).metrics
    left = {f"metric {name}": torch.tensor(value) for name, value in metrics.items()}
    for name, parameter in [*trained.parameters().items(), *trained.critic_parameters().items()]:
        left |= {name: parameter.clone(), f"gradient {name}": getattr(parameter, "grad", None)}
    return left


def assert_same_filled(algorithm: AlgorithmConfig, learner: dict[str, Any]) -> None:
    with deterministic(True):
        left = left_by_a_step(algorithm, learner)
    with filling():
        filled = left_by_a_step(algorithm, learner)
    assert left.keys() == filled.keys()
    for key, value in left.items():
        assert value is None or torch.equal(value.nan_to_num(-1.0), filled[key].nan_to_num(-1.0)), key


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.more_but("m2po", "ppo", "vcpo")
@pytest.mark.thorough_but(*APART)
def test_a_step_reads_no_memory_that_it_did_not_write(name: str) -> None:
    """So that memory may stay unfilled, which saves time."""
    assert_same_filled(preset(name), {})


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.more_but("bfloat16")
def test_nor_does_that_of_another_learner(name: str) -> None:
    assert_same_filled(AlgorithmConfig(), LEARNERS[name][0])


def refused_loss(inputs: LossInputs) -> torch.Tensor:
    """``put_`` is refused on CPUs, too."""
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    return -inputs.policy_logprobs * inputs.advantages


def test_an_operation_without_a_deterministic_algorithm_is_one_sentence(tmp_path: Path) -> None:
    words = f"algorithm.loss.target={HERE}:refused_loss"
    run(tmp_path / "free", *FAKE, words, "steps=1")
    with pytest.raises(ConfigError, match=r"^learner\.deterministic=true, but torch's put_ has no .*; allowed: false"):
        run(tmp_path / "run", *FAKE, words, "steps=1", "learner.deterministic=true")
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_error_is_left_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), deterministic(True):
        torch.ones(2) + torch.ones(3)
    assert not torch.are_deterministic_algorithms_enabled()


def flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


@pytest.mark.parametrize("own", [False, True])
def test_the_state_before_returns(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(own, warn_only=own)
    try:
        for wanted in (True, False):
            with deterministic(wanted):
                assert flags() == ((True, True, False) if wanted else (own, False, True))
            assert flags() == (own, False, True) and uninitialized.fill_uninitialized_memory
            assert torch.is_deterministic_algorithms_warn_only_enabled() == own
    finally:
        torch.use_deterministic_algorithms(False)


def test_learner_reference_and_critic_are_deterministic_and_the_generator_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one process, in which the next run is as free as before."""
    seen: set[tuple[str, bool]] = set()

    def watch(kind: type, method: str) -> None:
        original = getattr(kind, method)

        def note(self: Any, *arguments: Any, **options: Any) -> Any:
            seen.add((f"{kind.__name__}.{getattr(self, 'model_name', method)}", flags()[0]))
            return original(self, *arguments, **options)

        monkeypatch.setattr(kind, method, note)

    watch(TorchBackend, "__init__")
    watch(TorchBackend, "train_step")
    watch(RolloutPasses, "_numbers")
    watch(FakeEngine, "step")
    parts = ("algorithm=ppo", "algorithm.kl=reward", "algorithm.beta=0.1", "critic=service", "reference=service")
    settings = (*FAKE, *parts, "steps=2")
    run(tmp_path / "a", *settings, "learner.deterministic=true")
    learners = ("TorchBackend.__init__", "TorchBackend.train_step")
    services = ("RolloutPasses.reference model", "RolloutPasses.critic")
    assert seen == {*((name, True) for name in (*learners, *services)), ("FakeEngine.step", False)}
    seen.clear()
    run(tmp_path / "b", *settings)
    assert not any(on for _, on in seen) and len(seen) == 5


def test_a_reference_reads_ahead_deterministically(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(model_annotators, "load_reference", lambda policy, model, device, dtype: llama())
    monkeypatch.setattr(model_annotators.ReadingReference, "prefill", lambda *_: seen.append(flags()[0]))
    for wanted in (True, False):
        spec = ReferenceSpec(ReferenceConfig(workers=1), ModelConfig(), 1.0, "none", deterministic=wanted)
        ReferenceWorker(spec).prefill((), ())
    assert seen == [True, False]
