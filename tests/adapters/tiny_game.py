"""A game in the shape of verifiers' own TextArena: an environment of its own, whose agent is not called `agent`.

The taskset has no end, the game steps in this process, and answers each move as the user.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class GameTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class GameEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GameEnv(vf.Env[GameEnvConfig]):
    """Three moves, each answered with its number; the reward is the number of those that said 4."""

    async def run(self, task: Any, agents: Any) -> None:
        right, moves = 0, 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                moves += 1
                right += segment.last_reply == "4"
                if moves == 3:
                    break
                segment = await interaction.turn(f"move {moves}")
        interaction.trace.record_reward("game_reward", float(right), 1.0)


class GameTaskset(vf.Taskset[GameTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GameTask]:
        for i in itertools.count():
            yield GameTask(vf.TaskData(name=f"game#{i}", prompt=f"{i}+{i}="), self.config.task)


__all__ = ["GameEnv", "GameEnvConfig", "GameTaskset"]
