"""Settings of ``asyncrlhf evaluate``: ``evaluation.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check, check_range

ANSWERS = "answers"


@dataclass(frozen=True)
class EvaluationConfig:
    """``against``: a second model, or ``answers`` for the task's own; ``reward.*`` decides. ``reference``: the model
    that the KL and the perplexity speak of. Without top-p and top-k, so that the KL is that of what is sampled."""

    temperature: float = 0.0  # 0 is greedy
    num_generations: int = 1  # answers a prompt
    against: str = ""
    reference: str = ""
    samples_shown: int = 5  # on the terminal; evaluation.json has all of them

    def __post_init__(self) -> None:
        check_range("evaluation.temperature", self.temperature, low=0)
        check_range("evaluation.num_generations", self.num_generations, low=1)
        check_range("evaluation.samples_shown", self.samples_shown, low=0)
        check(
            self.temperature > 0 or self.num_generations == 1,
            f"evaluation.num_generations={self.num_generations} greedy answers would all be the same; "
            "allowed: 1, or evaluation.temperature > 0.",
        )
