"""Settings of the stage that makes preference data: ``preferences.*``."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.validation import check, check_choice, check_range

NOISES = ("none", "bradley_terry", "flip")


@dataclass(frozen=True)
class PreferencesConfig:
    """``num_prompts`` training prompts with ``num_generations`` answers each; an answer is in one pair.

    ``noise``: who labels a pair. ``none``, the answer with more ``reward.*`` is chosen; ``bradley_terry``, it is chosen
    with the probability sigmoid(margin / ``temperature``), the labeller of Gao et al. 2022 (2210.10760, section 2.2);
    ``flip``, the label is turned round with ``flip_probability``. Pairs of equal reward are dropped under each of them.
    """

    num_prompts: int = 512
    num_generations: int = 4
    noise: str = "none"
    temperature: float = 1.0  # of bradley_terry, in units of the reward
    flip_probability: float = 0.0

    def __post_init__(self) -> None:
        check_range("preferences.num_prompts", self.num_prompts, low=1)
        check_range("preferences.num_generations", self.num_generations, low=2)
        check_choice("preferences.noise", self.noise, NOISES)
        check_range("preferences.temperature", self.temperature, low=0, exclusive_low=True)
        check_range("preferences.flip_probability", self.flip_probability, low=0, high=0.5, exclusive_high=True)
        check(
            self.noise == "flip" or self.flip_probability == 0,
            f"preferences.flip_probability={self.flip_probability:g} needs preferences.noise=flip, not {self.noise}.",
        )
        check(
            self.noise == "bradley_terry" or self.temperature == 1,
            f"preferences.temperature={self.temperature:g} needs preferences.noise=bradley_terry, not {self.noise}.",
        )
