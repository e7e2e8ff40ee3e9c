"""A taskset whose tasks have a tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from tiny_calculator import Calculator


class ToolData(vf.TaskData):
    answer: str = ""


class ToolTask(vf.Task[ToolData]):
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def used_tool(self, trace: Any) -> float:
        return float(len(trace.tool_messages) > 0)

    @vf.reward(weight=0.5)
    async def tool_right(self, task: Any, trace: Any) -> float:
        return float(any(message.content == task.answer for message in trace.tool_messages))


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ToolTask]:
        yield ToolTask(ToolData(prompt="1+2=", answer="3", id="one"), self.config.task)


__all__ = ["ToolTaskset"]
