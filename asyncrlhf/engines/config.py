"""Settings of the generators: ``generator.*``."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrlhf.validation import check_choice, check_range


@dataclass(frozen=True)
class FakeConfig:
    """The fake engine's world: how long a response is and how long it takes, drawn from the request's seed.

    A request takes ``latency_median`` seconds times a log-normal factor of ``latency_sigma``, capped at
    ``latency_max_ratio`` times the median. With probability ``tail_probability`` it takes that cap itself.
    """

    latency_median: float = 0.05
    latency_sigma: float = 0.5
    latency_max_ratio: float = 50.0
    tail_probability: float = 0.0
    length_mean: float = 8.0
    length_sigma: float = 0.5
    correct_probability: float = 0.5  # how often the reference answer is what it writes
    failure_probability: float = 0.0

    def __post_init__(self) -> None:
        for key in ("latency_median", "latency_sigma", "length_sigma"):
            check_range(f"generator.fake.{key}", getattr(self, key), low=0)
        check_range("generator.fake.latency_max_ratio", self.latency_max_ratio, low=1)
        check_range("generator.fake.length_mean", self.length_mean, low=1)
        for key in ("tail_probability", "correct_probability", "failure_probability"):
            check_range(f"generator.fake.{key}", getattr(self, key), low=0, high=1)


@dataclass(frozen=True)
class GeneratorConfig:
    """``slots``: responses one replica generates at once; ``threads``: CPU threads of one replica (0: Ray's choice)."""

    engine: str = "hf"
    replicas: int = 1
    slots: int = 128
    max_completion_length: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    threads: int = 1
    gpus: float = 0.0  # GPUs of one replica; 0 runs it on the CPU
    ignore_eos: bool = False  # every response has max_completion_length tokens: for measurements
    max_restarts: int = 3  # a replica that dies is started again this often
    virtual_step_seconds: float = 0.01  # runtime=local: what one decode iteration costs on the virtual clock
    fake: FakeConfig = field(default_factory=FakeConfig)

    def __post_init__(self) -> None:
        check_choice("generator.engine", self.engine, ("hf", "fake"))
        check_range("generator.replicas", self.replicas, low=1)
        check_range("generator.slots", self.slots, low=1)
        check_range("generator.max_completion_length", self.max_completion_length, low=1)
        check_range("generator.temperature", self.temperature, low=0)
        check_range("generator.top_p", self.top_p, low=0, high=1, exclusive_low=True)
        check_range("generator.top_k", self.top_k, low=0)
        check_range("generator.threads", self.threads, low=0)
        check_range("generator.gpus", self.gpus, low=0)
        check_range("generator.max_restarts", self.max_restarts, low=0)
        check_range("generator.virtual_step_seconds", self.virtual_step_seconds, low=0)
