"""The parts of TRL scripts with tools and with environments, as TRL's documentation writes them. Nothing in here knows
asyncrlhf."""

from __future__ import annotations

from datasets import Dataset


def build_dataset() -> Dataset:
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "solution": a + b}
        for a in range(6)
        for b in range(4)
    ]
    return Dataset.from_list(rows)


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return a + b


async def double(a: int) -> int:
    """
    Doubles a number.

    Args:
        a: The number.

    Returns:
        Twice the number.
    """
    return 2 * a


def solved(prompts, completions, solution, log_extra=None, **kwargs):
    """Whether a tool's result is the solution."""
    if log_extra:
        results = [[m["content"] for m in completion if m["role"] == "tool"] for completion in completions]
        log_extra("results", [",".join(found) for found in results])
    for prompt, completion in zip(prompts, completions, strict=True):
        assert prompt[-1]["content"].startswith("What is")
        assert completion[0]["role"] == "assistant"
    return [
        float(any(m["role"] == "tool" and m["content"] == str(right) for m in completion))
        for completion, right in zip(completions, solution, strict=True)
    ]


def calls(completions, log_extra=None, **kwargs):
    """The number of calls."""
    if log_extra:
        log_extra("called", [sum(len(m.get("tool_calls") or []) for m in completion) for completion in completions])
    return [float(sum(len(m.get("tool_calls") or []) for m in completion)) for completion in completions]


class Counter:
    """Counts up to the row's goal."""

    def __init__(self):
        self.value = 0
        self._hidden = object()

    def reset(self, prompt, solution):
        self.value, self.goal = 0, solution
        return f" Count to {solution}."

    def increment(self, step: int) -> int:
        """
        Increments the counter.

        Args:
            step: By how much.

        Returns:
            The counter.
        """
        self.value += step
        return self.value

    def get_reward(self):
        return 1.0 if self.value == self.goal else -0.25 * (self.value > self.goal)


class Counting(Counter):
    def reset(self, solution):
        return super().reset(None, solution)


class Still:
    """Has no reward of its own."""

    def reset(self, **kwargs):
        assert "environment" not in kwargs
        return "Wait."

    def wait(self) -> str:
        """
        Does nothing.

        Returns:
            A word.
        """
        return "waited"


class Asking(Counter):
    """Owns its data."""

    def reset(self, seed, **kwargs):
        return super().reset(None, seed % 50)


def distance(prompts, environments, solution, log_extra=None, **kwargs):
    """How far the counter is from its goal, from the environments themselves."""
    if log_extra:
        log_extra("value", [e.value for e in environments])
    assert all(f"Count to {right}." in prompt[-1]["content"] for prompt, right in zip(prompts, solution, strict=True))
    return [-0.01 * abs(e.value - e.goal) for e in environments]
