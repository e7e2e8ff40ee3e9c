"""An agent with a tree of conversations for verifiers: it tries twice from its first answer, then compacts.

verifiers' own harness that compacts starts a program for every rollout, and installs it first; this one asks in this
process. Its trace has three leaves: two go on from the same answer, the third begins anew from a summary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI


class BranchingHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        **_: Any,
    ) -> Any:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:

            async def ask(conversation: list[Any], words: str) -> list[Any]:
                asked = [*conversation, {"role": "user", "content": words}]
                answer = await client.chat.completions.create(model=ctx.model, messages=asked)
                return [*asked, answer.choices[0].message.model_dump(exclude_none=True)]

            begun = await ask([], data.prompt)
            for words in ("more", "another way"):
                last = await ask(begun, words)
            await ask([], f"so far: {len(last)} messages; {data.prompt}")
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class DigitsTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def digits(self, trace: Any) -> float:
        said = "".join(str(message.content or "") for message in trace.assistant_messages)
        return sum(character.isdigit() for character in said) / max(1, len(said))


class BranchesTaskset(vf.Taskset[DigitsTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DigitsTask]:
        for i in range(8):
            yield DigitsTask(vf.TaskData(name=f"digits#{i}", prompt=f"{i}{i}"), self.config.task)


__all__ = ["BranchesTaskset", "BranchingHarness"]
