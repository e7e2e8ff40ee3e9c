"""A harness for verifiers that plays the conversation in this process: a chat loop with tools, no program per rollout.

The harnesses that come with verifiers start a program for every rollout, and install it first. This one keeps to the
documented contract (every model call goes through `endpoint` with `secret`) without either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

from rlbuffer.worker.envs.local_engine import CONTEXT_FULL

HARNESS = "rlbuffer_chat"
"""The harness's id in an agent's settings."""
OUT_OF_ROOM = "max_total_tokens"
"""Name in verifiers of a conversation that was cut off: it is scored, and counts as truncated."""
# verifiers finds a harness by the name of a top-level module, so this one gets such a name.
sys.modules.setdefault(HARNESS, sys.modules[__name__])

__all__ = ["ChatHarness"]


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc, unused-ignore]
    """No settings beyond those of every harness."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc, unused-ignore]
    """Asks the model, carries out the tool calls it makes, and asks again until it makes none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    SUPPORTS_MCP = True
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
        """Runs one segment of the conversation."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            tools, owners = await _tools(mcp_urls)
            while True:
                try:
                    answer = await client.chat.completions.create(
                        model=ctx.model, messages=messages, **({"tools": tools} if tools else {})
                    )
                except APIStatusError as error:
                    if trace.stop_condition is None and CONTEXT_FULL in str(error) and trace.num_turns:
                        trace.stop(OUT_OF_ROOM)
                    if trace.stop_condition is not None:  # a limit or a stop function refused the turn
                        break
                    raise
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = await _call(owners, call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _tools(urls: Mapping[str, str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the tools as a request names them, and the server of each."""
    tools, owners = [], {}
    for url in urls.values():
        async with _server(url) as server:
            for tool in (await server.list_tools()).tools:
                schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)
                function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
                tools.append({"type": "function", "function": function})
                owners[tool.name] = url
    return tools, owners


async def _call(owners: Mapping[str, str], name: str, arguments: str) -> str:
    """The answer of a tool; a call that cannot be made says why, since the policy may do better the next time."""
    if name not in owners:
        return f"error: there is no tool {name}"
    try:
        given = json.loads(arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(given, dict):
        return "error: the arguments are not an object"
    async with _server(owners[name]) as server:
        result = await server.call_tool(name, given)
    return "\n".join(getattr(block, "text", "") for block in result.content)


@asynccontextmanager
async def _server(url: str) -> AsyncIterator[ClientSession]:
    async with streamable_http_client(url) as streams, ClientSession(streams[0], streams[1]) as session:
        await session.initialize()
        yield session
