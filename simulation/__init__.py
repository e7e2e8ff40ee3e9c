"""The whole protocol under faults, in one thread, from one seed.

The real code runs here: the Lua files, the store over the real :class:`~rlbuffer.store.server.connection.Connection`
logic, `Daemon.run`, `Writer` and `Reader` with their own loops, threads and sleeps, and in every fifth seed scorers
(:mod:`simulation.scorers`) with their own search, claims and heartbeats. The simulated part lies around it:

- the server (:mod:`simulation.server`, :mod:`simulation.lua`): a small command model that drives the Lua files by lupa;
- the network (:mod:`simulation.network`): every round trip may be lost, answered into the void, come late or twice;
- time and threads (:mod:`simulation.scheduler`, :mod:`simulation.stand_ins`): a virtual clock, and greenlets in the
  place of threads and processes, so that a process can be killed or stopped at every round trip;
- the people (:mod:`simulation.actors`): supervisors that restart what died, an operator who drops groups.

After every event the invariants of docs/explain/protocol.md are checked on the server's data
(:mod:`simulation.invariants`); and ten times a second that the leader says why no step comes
(:mod:`simulation.reasons`).

This surrounding goes wrong in drawn ways: :data:`simulation.network` says which for a round trip,
:mod:`simulation.circumstances` which for a run (plans longer than a lease, a failover behind the same address, clocks
that are far off for a while, memory that is short, adapters, copies, strangers, ends that are said, a loop of
somebody's own whose ranks compare nothing and of which one has a step that the server loses),
:mod:`simulation.defects` which requests are wrong in themselves. :data:`NOT_MODELLED` says what is not modelled; many
seeds end with it, and with the branches of the Lua files (:mod:`simulation.branches`) that none of them entered. Two
thousand seeds must enter all.

    make sim SEEDS=2000                         # many seeds
    python -m simulation --seed 1234 -v         # one seed again, event by event
    python -m simulation --mutation no-tombstone  # a broken Lua file: how fast is it found?
    make mutations                              # small defects made by a tool: are they found? (simulation.mutate)

Needs lupa and greenlet; nothing of it is in the wheel.
"""

from __future__ import annotations

NOT_MODELLED = (
    "sockets, TLS, logins and access rights: commands go as lists, and every process may do everything",
    "a shard that is away or behind while others are not: payloads that no script reaches lie on the same server here",
    "replicas that are behind by more for one key than for another",
    "processes of other versions",
    "files of the server: what is lost is a second of everything, never half of a script",
    "memory in bytes: how full the server is, and what is too large for it, is drawn",
    "all bytes of a payload but those that are damaged",
    "the loops of workers, trainers and scorers themselves, checkpoint files, weights, samplers and evaluation",
    "more than two ranks, three adapters and a few groups of three rollouts",
)
"""Parts that are not modelled; tests on real servers and processes look at them."""
