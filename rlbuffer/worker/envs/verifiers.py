"""``verifiers``: environments of the verifiers package, 0.4 (`verifiers.v1`), played by the package itself.

verifiers drives the policy: it renders messages to tokens, asks a server for more, calls tools and scores. The server
that it asks here is the worker's own sampler behind a local address (:mod:`rlbuffer.worker.envs.local_engine`), so
every sampler works, and every token keeps its logprob and the exact version that sampled it. A rollout is token-exact,
or it is refused (:mod:`rlbuffer.worker.envs.traces`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import validate_call

from rlbuffer.config.table import Count, PathText
from rlbuffer.errors import ConfigError, TraceUnusable
from rlbuffer.records.rollout import Rollout
from rlbuffer.state.text import no_such_option
from rlbuffer.worker.envs.base import PolicyAccess
from rlbuffer.worker.envs.local_engine import MODEL, LocalEngine, TraceSession
from rlbuffer.worker.envs.order import Passes, PromptOrder
from rlbuffer.worker.envs.prompt import Prompt
from rlbuffer.worker.envs.text import Text
from rlbuffer.worker.envs.traces import rollout_of

NO_KEY = "RLBUFFER_NO_KEY"
"""Name of the variable that verifiers looks up for a key: there is none, and the local engine wants none."""


class Verifiers:
    """One environment of verifiers.

    A prompt is a task, named by its key; its tokens are the task's text alone, what the policy is given is the
    harness's and the renderer's business. Sampling is the worker's: its temperature, its nucleus.

    Args:
        taskset: id of an installed taskset.
        tokenizer: directory of the model's tokenizer.
        name: the env's name; "": the taskset's.
        environment: id of an environment to play it in; "": the taskset's own, else a single agent.
        taskset_options: the taskset's further settings.
        agent: settings of each agent, however the environment calls it; a harness in this process and a runtime on this
            machine unless they, or the environment, say otherwise.
        agents: settings of one agent more, by its name, where an environment has several.
        renderer: which renderer turns messages into tokens, such as ``{ name = "qwen3" }``. None: by the tokenizer's
            name; the general one that models without a known name get knows no tools and may split a conversation into
            several samples, which is refused.
        tasks: the first so many tasks; 0: all, of a taskset that ends.
        seed, shuffle: the order of tasks.
        max_new_tokens: longest turn.
        max_concurrent: rollouts at once.

    Raises:
        ConfigError: verifiers is not installed or refuses the settings, or the taskset has no end.
    """

    @validate_call
    def __init__(
        self,
        *,
        taskset: str,
        tokenizer: PathText,
        name: str = "",
        environment: str = "",
        taskset_options: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        agents: Mapping[str, Mapping[str, Any]] | None = None,
        renderer: Mapping[str, Any] | None = None,
        tasks: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        passes: Passes = 0,
        max_new_tokens: Count = 1024,
        max_concurrent: int = 64,
    ) -> None:
        self.name = name or taskset.rsplit("/", 1)[-1]
        import verifiers.v1 as vf

        from rlbuffer.worker.envs.chat_harness import HARNESS

        self._vf = vf
        self._text = Text(tokenizer, chat=False)
        self.vocab_size, self.eos_token_ids = self._text.vocab_size, self._text.eos_token_ids
        self.max_new_tokens, self.max_concurrent = max_new_tokens, max_concurrent
        self._client = {
            "api_key_var": NO_KEY,
            "renderer_model_name": str(Path(tokenizer).expanduser()),
            **({"renderer": dict(renderer)} if renderer else {}),
        }
        settings: dict[str, Any] = {
            "taskset": {"id": taskset, **(taskset_options or {})},
            **({"id": environment} if environment else {}),
        }
        try:
            declared = {
                seat: config for seat, config in vf.resolve_env_config(settings) if isinstance(config, vf.AgentConfig)
            }
            unknown = no_such_option("agents", agents or {}, declared)
            if unknown:
                raise ValueError(unknown)
            for seat, config in declared.items():
                defaults = {
                    "runtime": {"type": "subprocess"},
                    **({} if config.harness else {"harness": {"id": HARNESS}}),
                }
                settings[seat] = {**defaults, **(agent or {}), **(agents or {}).get(seat, {})}
            self._env: Any = vf.load_environment(vf.resolve_env_config(settings))
            self._tasks = tasks_of(self._env.taskset, tasks)
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"verifiers: {type(error).__name__}: {error}", setting="env_options") from error
        self._order = PromptOrder(len(self._tasks), seed=seed, shuffle=shuffle, passes=passes)
        self.tickets = self._order.tickets
        content = hashlib.sha256("\n".join(task.hash for task in self._tasks).encode()).hexdigest()
        of_data = {"env": "verifiers", "taskset": taskset, "digest of its tasks": content[:12]}
        self.identity = {**of_data, **self._order.identity}
        self._engine = LocalEngine()
        self._starting: asyncio.Future[None] | None = None
        self._ending = asyncio.Event()
        self._server: asyncio.Task[None] | None = None

    def prompt(self, number: int) -> Prompt:
        epoch, index = self._order.place(number)
        data = self._tasks[index].data
        words = data.prompt if isinstance(data.prompt, str) else ""
        return Prompt(
            prompt_id=str(data.id or data.name or f"task-{index}"),
            tokens=self._text.prompt(words or " "),
            metadata={"taskset": self._env.config.taskset.id, "index": index, "epoch": epoch},
        )

    async def rollout(self, prompt: Prompt, policy: PolicyAccess) -> Rollout:
        """Has verifiers play one task once."""
        await self._serve()
        task = self._tasks[int(prompt.metadata["index"])]
        sessions: dict[str, TraceSession] = {}

        def minted(trace: Any) -> None:
            sessions[trace.id] = self._engine.open(trace.id, policy)

        context = self._vf.ModelContext(
            model=MODEL,
            client=self._vf.TrainClientConfig(base_url=f"{self._engine.url}/v1", **self._client),
            sampling=self._vf.SamplingConfig(max_tokens=policy.sampling.max_new_tokens),
        )
        try:
            (slot,) = self._env.slots(task, n=1)
            episode = await self._env.run_slot(slot, context, on_trace=minted)
        finally:
            for name in sessions:
                self._engine.forget(name)
        for session in sessions.values():
            if session.error is not None:
                raise session.error
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if len(traces) != 1:
            raise TraceUnusable(f"the episode has {len(traces)} traces to train, a rollout is one")
        trace = traces[0]
        completions = sessions[trace.id].completions if trace.id in sessions else []
        tokens = [node.token_ids for branch in trace.branches[:1] for node in branch.nodes]
        text = self.render(np.asarray(list(itertools.chain.from_iterable(tokens)), np.int32))
        return rollout_of(trace, completions, text=text)

    def render(self, tokens: NDArray[np.int32]) -> str:
        return self._text.render(tokens)

    async def close(self) -> None:
        """Stops the tool servers and the local engine."""
        self._ending.set()
        if self._server is not None:
            with contextlib.suppress(Exception):  # the rollouts have said what went wrong there
                await self._server
        await self._engine.close()

    async def _serve(self) -> None:
        """Starts, once, what rollouts share; later calls wait for it."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_future()
            # A task of its own: what is entered in it must be left in it.
            self._server = asyncio.create_task(self._serving(self._starting))
        await asyncio.shield(self._starting)

    async def _serving(self, started: asyncio.Future[None]) -> None:
        try:
            await self._engine.start()
            async with self._env.serving():
                started.set_result(None)
                await self._ending.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
                self._starting = None  # the next rollout tries again
            raise


def tasks_of(taskset: Any, limit: int) -> list[Any]:
    """The first `limit` tasks of a taskset; 0: all.

    Raises:
        ValueError: it has none, or no end.
    """
    if not limit and not taskset.bounded:
        raise ValueError("the taskset has no end: say how many of its tasks to use (env_options.tasks)")
    tasks = list(itertools.islice(iter(taskset), limit or None))
    if not tasks:
        raise ValueError("the taskset has no tasks")
    return tasks
