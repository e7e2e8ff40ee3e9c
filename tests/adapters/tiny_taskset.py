"""A taskset as people write them for verifiers: sums, one answer each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def exact(self, task: Any, trace: Any) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def has_digit(self, trace: Any) -> float:
        return float(any(character.isdigit() for character in trace.last_reply))

    @vf.metric
    async def reply_length(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class TinyTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for i in range(5):
            yield SumTask(SumData(prompt=f"{i}+{i}=", answer=str(2 * i), id=f"add-{i}"), self.config.task)


__all__ = ["TinyTaskset"]
