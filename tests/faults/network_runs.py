"""A run whose every connection goes through a proxy that loses, breaks off and delays, while processes are halted."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import ExitStack

from homes import Home
from kill_runs import TAIL_STEPS, Watch, finish, inspect_end, inspect_uses, write_config
from outcome import Outcome, Say
from own_server import OwnServer
from places import EMBEDDED, lead, servers_at
from processes_under_test import KINDS, Processes
from wire_faults import FaultProxy, draw_faults

LONGEST_PAUSE_SECONDS = 8.0
"""Seconds that a process is halted: longer than a lease, shorter than what makes a trainer give up."""
SETTLE_SECONDS = 60.0
"""Seconds that an armed fault may wait at the end for a request that it fits."""


def run_network(
    home: Home, *, seed: int, faults: int, pauses: int, steps: int, say: Say, place: str = EMBEDDED
) -> Outcome:
    """`faults` network faults and `pauses` halts (SIGSTOP, SIGCONT), spread over a run of `steps` steps.

    At another `place` every server is announced as the proxy before it, and none is halted: that would be a failover.
    On the embedded one it is a server of its own, on TCP.
    """
    outcome = Outcome(name=f"network on the {place} (seed {seed})")
    began = time.monotonic()
    draw = random.Random(f"pauses {seed}")
    with ExitStack() as ends:
        servers = ends.enter_context(servers_at(home, place))
        if servers is None:
            alone = ends.enter_context(OwnServer(home.path / "tcp"))
            proxy = ends.enter_context(FaultProxy([alone.port]))
            lead(home, proxy.url, looking=alone.url)
            kinds, server_pid = KINDS, alone.pid
        else:
            proxy = ends.enter_context(FaultProxy([server.port for server in servers.servers]))
            lead(home, servers.announce(proxy.ports))
            kinds, server_pid = KINDS[:-1], 0
        halts = {draw.randrange(faults): draw.choice(kinds) for _ in range(pauses)}
        config = write_config(home, steps=steps, keep_checkpoints=3)
        supervisor = home.start("run", config, "--display", "plain", log="run")
        processes = Processes(home, supervisor.pid, server_pid=server_pid)
        progress = Watch(home, supervisor)
        threads: list[threading.Thread] = []
        drawn = draw_faults(seed, faults)
        for i, fault in enumerate(drawn):
            if not progress.reaches(2 + i * (steps - TAIL_STEPS) // faults, outcome):
                break
            proxy.arm(fault)
            if i in halts and (found := processes.find(halts[i])):
                name, seconds = draw.choice(sorted(found)), draw.uniform(0.2, LONGEST_PAUSE_SECONDS)
                say(f"  {time.monotonic() - began:5.0f} s  step {progress.last}: {seconds:.1f} s SIGSTOP for {name}")
                threads.append(processes.pause(found[name], seconds))
                outcome.faults["SIGSTOP"] += 1
            elif i % 20 == 0:
                say(f"  {time.monotonic() - began:5.0f} s  step {progress.last}: {len(proxy.struck)} faults so far")
        for thread in threads:
            thread.join()
        deadline = time.monotonic() + SETTLE_SECONDS
        while len(proxy.struck) < faults and supervisor.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        outcome.faults += Counter(drawn[i]["kind"] for i in proxy.struck)
        outcome.facts["clients struck"] = dict(Counter(name.split("-")[0] for name in proxy.struck.values()))
        if len(proxy.struck) < faults:
            outcome.findings.append(f"only {len(proxy.struck)} of {faults} faults struck")
        finish(home, outcome, supervisor, steps)
        outcome.seconds = time.monotonic() - began
        if servers is not None:
            inspect_uses(home, outcome, steps, servers, {})
        elif not outcome.findings:
            inspect_end(home, outcome, steps, alone.directory)
    return outcome
