"""A run whose processes and server are killed with SIGKILL, one after the other."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

from accounts import check_ledger, check_metrics, check_recorded, check_trained, check_uses
from aof import Steps, read_written
from homes import Home
from outcome import Outcome, Say
from places import EMBEDDED, Servers, lose_primary, note_steps, servers_at
from processes_under_test import KINDS, Processes

WORLD_SIZE = 2
TAIL_STEPS = 5
"""Steps at the end in which nothing is killed any more: the run ends by itself."""
STALL_SECONDS = 150.0
"""Without a new step for so long the run is stuck: a finding. A dead worker's tickets alone take 60 s to come back."""
POLL_SECONDS = 0.05


def draw_victims(seed: int, kills: int) -> list[str]:
    """The kinds to kill, in order; each kind as often as the others, the remainder drawn.

    `rlbuffer run` gives up on a process that dies eight times in a row within 30 s each, which is what it should do, so
    what it starts itself (`serve`, workers) is not in the remainder: of 30 kills they get seven each.
    """
    draw = random.Random(f"kills {seed}")
    victims = [kind for kind in KINDS for _ in range(kills // len(KINDS))]
    victims += draw.choices(("rank", "server"), k=kills - len(victims))
    draw.shuffle(victims)
    return victims


def run_kills(home: Home, *, seed: int, kills: int, steps: int, say: Say, place: str = EMBEDDED) -> Outcome:
    """Kills `kills` processes of a run of `steps` steps; the next one only when a step was trained since the last.

    Elsewhere than on the embedded server the "server" is a primary, whose replica takes its place; what it had
    acknowledged and not sent on is lost, so the account is that of the uses alone.
    """
    outcome = Outcome(name=f"kill -9 on the {place} (seed {seed})")
    draw = random.Random(f"moments {seed}")
    began = time.monotonic()
    committed: Steps = {}
    with servers_at(home, place) as servers:
        config = write_config(home, steps=steps, keep_checkpoints=1000)
        supervisor = home.start("run", config, "--display", "plain", log="run")
        processes = Processes(home, supervisor.pid)
        progress = Watch(home, supervisor)
        for i, kind in enumerate(draw_victims(seed, kills)):
            # A kill per so many steps, so that the last one comes before the end.
            due = max(progress.last + 1, 2 + i * (steps - TAIL_STEPS) // kills)
            if not progress.reaches(due, outcome):
                break
            if kind == "server" and servers is not None:
                time.sleep(draw.uniform(0, 0.3))
                port = servers.primary.port
                away = lose_primary(servers, committed)
                struck = f"the primary at port {port}, nobody there for {away:.1f} s"
            elif found := progress.await_any(processes, kind, outcome):
                time.sleep(draw.uniform(0, 0.3))
                name = draw.choice(sorted(found))
                struck = f"{name} ({found[name]})"
                processes.kill(name, found[name])
            else:
                break
            say(f"  {time.monotonic() - began:5.0f} s  step {progress.last}: kill -9 {struck}")
            outcome.faults[kind] += 1
            progress.last = home_step(home)
        finish(home, outcome, supervisor, steps)
        outcome.seconds = time.monotonic() - began
        if servers is not None:
            inspect_uses(home, outcome, steps, servers, committed)
        elif not outcome.findings:
            inspect_end(home, outcome, steps, home.path / "server")
    if sum(outcome.faults.values()) < kills:
        outcome.findings.append(f"only {sum(outcome.faults.values())} of {kills} processes were killed")
    return outcome


def write_config(home: Home, *, steps: int, keep_checkpoints: int, micro_batches: int = 1) -> Path:
    """Small settings: steps of a fraction of a second, a checkpoint every five."""
    sizes = {"micro_batches": micro_batches, "world_size": WORLD_SIZE}
    return home.config(steps=steps, checkpoint_every=5, keep_checkpoints=keep_checkpoints, **sizes)


class Watch:
    """Progress of a run, and whether it still lives."""

    def __init__(self, home: Home, supervisor: subprocess.Popen[str]) -> None:
        self._home, self._supervisor = home, supervisor
        self.last = 0
        """Highest step when the last fault struck."""

    def reaches(self, step: int, outcome: Outcome) -> bool:
        """Waits for a step. -> False, with a finding, when the run ends or stands still before."""
        highest, since = -1, time.monotonic()
        while (now := home_step(self._home)) < step:
            if self._supervisor.poll() is not None:
                why = self._home.logs() if self._supervisor.returncode else ""
                outcome.findings.append(f"the run ended at step {now}, before its faults were over\n{why}".rstrip())
                return False
            if now != highest:
                highest, since = now, time.monotonic()
            if time.monotonic() - since > STALL_SECONDS:
                outcome.findings.append(f"no step after step {now} within {STALL_SECONDS:g} s\n{self._home.logs()}")
                return False
            time.sleep(POLL_SECONDS)
        self.last = now
        return True

    def await_any(self, processes: Processes, kind: str, outcome: Outcome) -> dict[str, int]:
        """Waits for a process of a kind. -> {} , with a finding, when none comes."""
        since = time.monotonic()
        while not (found := processes.find(kind)):
            if self._supervisor.poll() is not None or time.monotonic() - since > STALL_SECONDS:
                outcome.findings.append(f"no {kind} is there")
                break
            time.sleep(POLL_SECONDS)
        return found


def finish(home: Home, outcome: Outcome, supervisor: subprocess.Popen[str], steps: int) -> None:
    """The run ends by itself at its planned step; `rlbuffer verify` finds nothing."""
    watch = Watch(home, supervisor)
    if not outcome.findings and watch.reaches(steps, outcome):
        try:
            code = supervisor.wait(timeout=120)
            if code != 0:
                outcome.findings.append(f"`rlbuffer run` ended with exit code {code}\n{home.logs()}")
        except subprocess.TimeoutExpired:
            outcome.findings.append("`rlbuffer run` did not end within 120 s after its last step")
    verified = home.call("verify", "--run", "tiny")
    outcome.facts["verify"] = f"exit {verified.returncode}, {verified.stdout.strip().splitlines()[-1:]}"
    if verified.returncode != 0:
        outcome.findings.append(f"`rlbuffer verify`: {verified.stdout}{verified.stderr}")


def inspect_uses(home: Home, outcome: Outcome, steps: int, servers: Servers, committed: Steps) -> None:
    """Computes the uses of rollouts again, where servers may have lost steps; `committed` are those noted so far."""
    note_steps(servers, committed)
    outcome.findings += check_metrics(home.metrics(), steps)
    outcome.findings += check_uses(committed, home.metrics())


def inspect_end(home: Home, outcome: Outcome, steps: int, server_directory: Path) -> None:
    """Recomputes the account of a run that has ended."""
    metrics = home.metrics()
    try:
        written = read_written(server_directory, "tiny")
    except ValueError as error:
        outcome.findings.append(f"the account cannot be computed again: {error}; fewer steps leave the file whole")
        return
    outcome.findings += check_metrics(metrics, steps)
    outcome.findings += check_trained(written, metrics, max_uses=1)
    with home.connect() as buffer:
        outcome.findings += check_ledger(buffer, written, steps)
        outcome.findings += check_recorded(buffer, metrics, WORLD_SIZE)
        total = buffer.ledger().total()
        outcome.facts["steps trained"] = f"{steps} ({len(metrics)} with those trained again)"
        outcome.facts["rollouts, tokens"] = (
            f"pushed {total.pushed}, trained {total.trained}, packed {total.packed}, pending {total.pending}, "
            f"dropped {dict(total.dropped)}"
        )
        outcome.facts["live steps"] = buffer.store.meta().step - buffer.store.meta().retired


def home_step(home: Home) -> int:
    """Highest step that was trained so far."""
    return max((record["step"] for record in home.metrics()), default=0)
