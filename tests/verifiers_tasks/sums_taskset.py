"""A taskset of verifiers: sums of a number with itself. Only verifiers' own environment imports it."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    most: int = 5


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        tasks = [SumsData(prompt=f"{n}+{n}=", answer=str(2 * n)) for n in range(self.config.most)]
        return [SumsTask(data, self.config.task) for data in tasks]
