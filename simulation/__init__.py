"""The whole protocol under faults, in one thread, from one seed.

The real code runs here: the Lua files, the store over the real :class:`~rlbuffer.store.connection.Connection` logic,
`Daemon.run`, `Writer` and `Reader` with their own loops, threads and sleeps, and in every fifth seed scorers
(:mod:`simulation.scorers`) with their own search, claims and heartbeats. What is simulated is what lies around it:

- the server (:mod:`simulation.server`, :mod:`simulation.lua`): a small command model that drives the Lua files by lupa;
- the network (:mod:`simulation.network`): every round trip may be lost, answered into the void, come late or twice;
- time and threads (:mod:`simulation.scheduler`, :mod:`simulation.stand_ins`): a virtual clock, and greenlets in the
  place of threads and processes, so that a process can be killed or stopped at every round trip;
- the people (:mod:`simulation.actors`): supervisors that restart what died, an operator who drops groups.

After every event the invariants of docs/protocol.md are checked on the server's data (:mod:`simulation.invariants`).

    make sim SEEDS=2000                         # many seeds
    python -m simulation --seed 1234 -v         # one seed again, event by event
    python -m simulation --mutation no-tombstone  # a broken Lua file: how fast is it found?

Needs lupa and greenlet; nothing of it is in the wheel.
"""
