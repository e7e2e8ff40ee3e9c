"""LoRA adapters of a run: how far each is, in a line of `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlbuffer.state.text import amount, plural, printable

if TYPE_CHECKING:
    from rlbuffer.store.viewer import Viewer


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSummary:
    """One adapter as after the last committed step."""

    adapter: str
    samples: int
    """Rollouts packed or trained in this run."""
    tokens: int
    step: int
    """Own steps made."""
    gathered: int
    """Rollouts since the last one."""
    ready_to_update: bool
    """The last committed step completes its batch."""
    policy_version: int
    """Published; -1 when none was announced."""


def summarize_adapters(store: Viewer) -> tuple[AdapterSummary, ...]:
    """Every adapter that was trained or announced, by name; all weights are the run's own line."""
    state = store.load_state() or {}
    published = {adapter: policy.version for adapter, policy in store.trainer().policies.items()}
    named = state.get("adapters") if isinstance(state, Mapping) else None
    if published.keys() <= {""} and not (isinstance(named, Mapping) and named.keys() - {""}):
        return ()
    from rlbuffer.batcher.adapters import AdapterAccount, AdapterAccounts
    from rlbuffer.errors import PayloadError, RlbufferError, StepRetired

    try:
        accounts = AdapterAccounts.load(state).accounts
    except RlbufferError:  # the batcher says it when it leads; whoever looks sees the rest
        accounts = {}
    step = store.meta().step
    try:
        header = store.wait_step(step, block_seconds=0.0) if step else None
    except (PayloadError, StepRetired):
        header = None
    last = {} if header is None else header.adapters
    out = []
    for adapter in sorted((accounts.keys() | published.keys()) - {""}):
        account = accounts.get(adapter, AdapterAccount())
        out.append(
            AdapterSummary(
                adapter=adapter,
                samples=account.samples,
                tokens=account.tokens,
                step=account.step,
                gathered=account.gathered,
                ready_to_update=adapter in last and last[adapter].ready_to_update,
                policy_version=published.get(adapter, -1),
            )
        )
    return tuple(out)


def adapter_line(one: AdapterSummary) -> str:
    """The adapter in a few words."""
    version = f"v{one.policy_version}" if one.policy_version >= 0 else "not announced"
    state = "ready to update" if one.ready_to_update else f"{plural(one.gathered, 'rollout')} since"
    return (
        f"{printable(one.adapter)} {version} · own step {one.step}, {state} · "
        f"{plural(one.samples, 'rollout')} ({amount(one.tokens)} tokens)"
    )
