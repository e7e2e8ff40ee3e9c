"""A run whose workers' login is in hostile hands: strange values on every key that it may write, and hostile pushes.

Every process has the user of its role in deploy/users.acl, and no more; the workers' user is tied to this run. Some of
what that user may do by right holds steps up and is no finding (docs/guide/deploy.md, Who is trusted with what): it may
take all tickets and say that an env is done. So an operator sets that right before steps are expected again.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import redis
from accounts import check_metrics
from homes import Home
from hostile_moves import Attacker
from kill_runs import home_step, write_config
from outcome import Outcome, Say
from own_server import OwnServer

from rlbuffer.client.buffer import Buffer
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.records import EnvLedger
from rlbuffer.testing import make_group

RUN, OTHER = "tiny", "other"
ENVS = ("vcopy", "repeat")
USERS = Path(__file__).parents[2] / "deploy" / "users.acl"
AT_ONCE = 200
"""Hostile pushes in a pipeline."""
STEPS_AFTER = 3
"""Steps that must come when the attack is over."""
PATIENCE_SECONDS = 420.0
"""A worker that is started again imports torch; where other runs do the same that has taken over two minutes."""
BREATH_SECONDS = 1.0
"""At most so long the attacker waits for a step after each move, so that moves meet a run at work."""
GROUP_SECONDS = 20.0
HELD_SECONDS = 10.0
"""After so long without a step the operator sets right what holds the run up, while the attack goes on."""
JAMMED = b"18446744073709551615-"
"""Begins the largest ids of a stream."""
VIEWS = (("inspect",), ("verify",), ("runs", "list"))
BROKEN = ("Traceback (most recent call last)", "This is a defect")
STARTED_AGAIN = ("starting it again", "Starting all")
SCORER = '\n[score.ref]\nmodel = "initial"\ndevice = "cpu"\nenvs = ["repeat"]\n'


def run_hostile(
    home: Home, *, moves: int, pushes: int, seed: int, say: Say, program: str | None = None, world_size: int = 2
) -> Outcome:
    """Sends `moves` moves and `pushes` pushes with a worker's rights while steps are made.

    `program` is the server's; None: the bundled one.
    """
    outcome = Outcome(name=f"hostile (seed {seed})")
    began = time.monotonic()
    (home.path / "users.acl").write_text(_users())
    config = _config(home, world_size)
    options = {"aclfile": str(home.path / "users.acl")}
    with OwnServer(home.path / "own", options=options, program=program) as server:
        stage = _Stage(home, server, config)
        stage.start()
        other = stage.make_other()
        home.wait_until(lambda: home_step(home) >= 2, seconds=PATIENCE_SECONDS, why="two steps before the attack")
        attacker = Attacker(
            redis.Redis(port=server.port, username="worker", password="CHANGE-worker", protocol=3),
            RUN,
            other=OTHER,
            envs=ENVS,
            dice=random.Random(seed),
        )
        try:
            before = home_step(home)
            _attack(stage, attacker, moves, pushes, outcome, say)
            outcome.facts["steps during the attack"] = home_step(home) - before
        finally:
            attacker.client.close()
        outcome.findings += [f"a worker's login may: {command}" for command in attacker.allowed]
        outcome.findings += stage.ended()
        outcome.facts["taken by the server"] = dict(sorted(attacker.taken.items()))
        outcome.findings += [
            f"the server took no {kind}, so none was tried"
            for kind in ("push by script", "sealed push")
            if not attacker.taken[kind]
        ]
        outcome.facts["set right at the end"] = stage.set_right()
        wanted = home_step(home) + STEPS_AFTER
        if not stage.await_step(wanted, PATIENCE_SECONDS):
            outcome.findings.append(f"no step {wanted} within {PATIENCE_SECONDS:g} s after the attack: {stage.waits()}")
        outcome.findings += stage.ended()
        outcome.findings += stage.stop()
        outcome.findings += _check(home, stage, outcome)
        now = stage.everything_of_other()
        if changed := sorted(key for key in now.keys() | other.keys() if now.get(key) != other.get(key)):
            outcome.findings.append(f"keys of run {OTHER!r} on the same server are others than before: {changed}")
        outcome.findings += _said_wrong(home)
    outcome.seconds = time.monotonic() - began
    return outcome


def _users() -> str:
    """The shipped users; the worker's is tied to its run as docs/guide/deploy.md says."""
    lines = USERS.read_text().splitlines()
    tied = [
        line.replace("{rlb:*}", f"{{rlb:{RUN}}}").replace("rlb:*:", f"rlb:{RUN}:") if "user worker " in line else line
        for line in lines
    ]
    return "\n".join(tied) + "\n"


def _config(home: Home, world_size: int) -> Path:
    # More steps than can be made; no checkpoint, so that every step stays and can be looked at.
    path = write_config(home, steps=100_000, keep_checkpoints=2)
    text = (
        path.read_text()
        .replace("every = 5", "every = 100000")
        # Groups that need what no scorer gives hold tickets until then.
        .replace("[batcher]\n", f"[batcher]\ngroup_timeout_seconds = {GROUP_SECONDS:g}\n")
        .replace("vocab_size = 16", "vocab_size = 13")
        .replace("timeout_seconds = 120.0", f"timeout_seconds = {PATIENCE_SECONDS:g}")
        .replace("world_size = 2", f"world_size = {world_size}")
    )
    path.write_text(text + SCORER)
    return path


class _Stage:
    """The processes of the run, each with its role's user."""

    def __init__(self, home: Home, server: OwnServer, config: Path) -> None:
        self._home, self._server, self._config = home, server, config
        self._roles: dict[str, subprocess.Popen[str]] = {}
        self._workers: dict[str, subprocess.Popen[str]] = {}
        self.worker_ends: Counter[str] = Counter()

    def start(self) -> None:
        home = self._home
        self._as_user("operator")
        self._roles["serve"] = home.start("serve", "--config", self._config, log="serve")
        home.wait_until(lambda: "serving" in home.printed(), seconds=60, why="the batcher")
        self._start_workers()
        self._as_user("scorer")
        self._roles["scorer"] = home.start("score", "ref", "--config", self._config, log="scorer")
        self._as_user("trainer")
        self._roles["train"] = home.start("train", "--config", self._config, "--display", "plain", log="train")

    def view(self, *arguments: str) -> list[str]:
        """Runs a command of the viewer, and returns the findings."""
        self._as_user("viewer")
        called = self._home.call(*arguments, *(() if arguments == ("runs", "list") else ("--run", RUN)))
        said = called.stdout + called.stderr
        wrong = called.returncode not in ((0, 1) if arguments == ("verify",) else (0,))
        if wrong or any(words in said for words in BROKEN):
            return [f"`rlbuffer {' '.join(arguments)}` ended with {called.returncode}: {said[-3000:]}"]
        return []

    def ended(self) -> list[str]:
        """Processes of other roles that have ended."""
        return [
            f"`rlbuffer {name}` ended with exit code {process.poll()}: {self._tail(name)}"
            for name, process in self._roles.items()
            if process.poll() is not None
        ]

    def await_step(self, wanted: int, seconds: float) -> bool:
        """True when the step is trained before so long; False when it is not, or a process ends."""
        since = time.monotonic()
        while (now := home_step(self._home)) < wanted and time.monotonic() - since < seconds and not self.ended():
            time.sleep(0.2)
        return now >= wanted

    def waits(self) -> str:
        """The batcher's waiting sentence."""
        said = (self._home.path / "serve.log").read_text(errors="replace").splitlines()
        return "\n".join([line for line in said if "waiting:" in line][-3:])

    def keep_workers(self) -> None:
        """A worker is of the attacker's own role: it may end, and comes back as its supervisor would bring it."""
        for env, process in list(self._workers.items()):
            if process.poll() is not None:
                self.worker_ends[env] += 1
                self._start_worker(env)

    def set_right(self) -> list[str]:
        """Does what docs/guide/deploy.md tells an operator to do after such an attack, and returns what there was to
        do."""
        done = []
        with self._admin() as client:
            now = 1000 * int(client.time()[0])
            tag = f"{{rlb:{RUN}}}"
            pool = f"{tag}:pool"
            if client.exists(pool) and client.xinfo_stream(pool)["last-generated-id"].startswith(JAMMED):
                client.delete(pool)  # it takes no push any more
                done.append("the pool")
            for env in ENVS:
                if taken := client.zremrangebyscore(f"{tag}:tickets:{env}", now + 3_600_000, "+inf"):
                    done.append(f"{taken} tickets of {env}")
                number = client.hget(f"{tag}:numbers", env) or b"0"
                if not number.isdigit() or len(number) > 14:
                    client.hset(f"{tag}:numbers", env, str(10**6))
                    done.append(f"the next number of {env}, {number[:20].decode(errors='replace')!a}")
                if end := client.hget(f"{tag}:ends", env):
                    done.append(f"the end of {env}, {end[:20].decode(errors='replace')!a}")
        with self.buffer() as buffer:
            for env in ENVS:
                buffer.store.role(OperatorStore).forget_end(env)
        for process in self._workers.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._workers.values():
            process.wait(timeout=120)
        self._start_workers()
        return done

    def stop(self) -> list[str]:
        """Ends the run: the trainer first, then the others. Returns the findings."""
        findings = []
        for name, process in [("train", self._roles["train"]), *self._workers.items(), *self._roles.items()]:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                findings.append(f"`rlbuffer {name}` did not end within 120 s")
                continue
            if code != 0 and name in self._roles and name != "train":
                findings.append(f"`rlbuffer {name}` ended with exit code {code}: {self._tail(name)}")
        return findings

    def buffer(self) -> Buffer:
        self._as_user("operator")
        return self._home.connect()

    def make_other(self) -> dict[bytes, bytes | None]:
        """Makes another run on the same server, and returns everything of it."""
        self._as_user("operator")
        with self._home.connect(OTHER) as buffer:
            writer = buffer.writer("w")
            for number in range(4):
                writer.push(make_group(env="a", seed=number))
        return self.everything_of_other()

    def everything_of_other(self) -> dict[bytes, bytes | None]:
        prefix = f"rlb:{OTHER}".encode()
        with self._admin() as client:
            keys = sorted(key for key in client.scan_iter(count=1000) if key.lstrip(b"{").startswith(prefix))
            return {key: client.dump(key) for key in keys}

    def _start_workers(self) -> None:
        for env in ENVS:
            self._start_worker(env)

    def _start_worker(self, env: str) -> None:
        self._as_user("worker")
        self._workers[env] = self._home.start("worker", env, "--config", self._config, log=f"worker-{env}")

    def _as_user(self, role: str) -> None:
        address = self._server.url.replace("//", f"//{role}:CHANGE-{role}@")
        self._home.environment["RLBUFFER_REDIS_URL"] = self._home.url = address

    def _admin(self) -> redis.Redis:
        return redis.Redis(port=self._server.port, username="operator", password="CHANGE-operator")

    def _tail(self, name: str) -> str:
        return (self._home.path / f"{name}.log").read_text(errors="replace")[-3000:]


def _attack(stage: _Stage, attacker: Attacker, moves: int, pushes: int, outcome: Outcome, say: Say) -> None:
    home, began = stage._home, time.monotonic()
    sending = attacker.pushes(pushes, at_once=AT_ONCE) if pushes else iter(())
    sent = rescues = 0
    last, since = home_step(home), began
    for i, kind in enumerate(attacker.draw_moves(moves)):
        said = attacker.move(kind)
        outcome.faults["move"] += 1
        step = home_step(home)
        say(f"  {time.monotonic() - began:4.0f} s  step {step}: {kind}: {said}")
        while sent < pushes * (i + 1) // moves:
            now = next(sending)
            outcome.faults["push"] += now - sent
            sent = now
        until = time.monotonic() + BREATH_SECONDS
        while home_step(home) <= step and time.monotonic() < until:
            time.sleep(0.05)
        if i % max(1, moves // len(VIEWS)) == 0:
            outcome.findings += stage.view(*VIEWS[(i * len(VIEWS) // moves) % len(VIEWS)])
        stage.keep_workers()
        if home_step(home) > last:
            last, since = home_step(home), time.monotonic()
        elif time.monotonic() - since > HELD_SECONDS:
            say(f"  held up; set right: {', '.join(stage.set_right()) or 'the workers'}")
            rescues += 1
            stage.await_step(last + 1, PATIENCE_SECONDS / 3)
            since = time.monotonic()
        if stage.ended():
            say(f"  a process ended after {kind}")
            return
    outcome.facts["held up by right, and set right by the operator"] = f"{rescues} times"
    outcome.facts["workers that ended"] = dict(stage.worker_ends)


def _check(home: Home, stage: _Stage, outcome: Outcome) -> list[str]:
    """Steps are as they were trained, no rollout is in two, and what the account has wrong is named by `verify`."""
    for view in VIEWS:
        if found := stage.view(*view):
            return found
    metrics = home.metrics()
    findings = check_metrics(metrics, home_step(home))
    trained = {record["step"]: record["digest"] for record in metrics}
    accounts: dict[str, dict[str, tuple[int, int]]] = {}
    steps_of: dict[tuple[str, str], int] = {}
    with stage.buffer() as buffer:
        named = [f"{finding.invariant} {finding.message}" for finding in buffer.verify().findings]
        outcome.facts["findings of verify"] = dict(Counter(line.partition(" ")[0] for line in named))
        for header in buffer.store.headers():
            if header.step in trained and trained[header.step] != header.digest:
                findings.append(f"step {header.step} was trained with another digest than it has")
            fate = "trained" if header.step <= buffer.store.trainer().trained else "packed"
            for member in (m for part in buffer.store.read_parts(header.step) for m in part.rollouts):
                name = (member.group_id, member.info.rollout_id)
                if name in steps_of:
                    findings.append(f"rollout {name} is in step {steps_of[name]} and in step {header.step}")
                steps_of[name] = header.step
                _count(accounts, member.env, fate, 1, member.info.length)
        for entry in buffer.store.read_pool(count=10**6):
            _count(accounts, entry.env, "pending", entry.rollouts, entry.tokens)
        ledger = buffer.ledger().envs
        outcome.facts["steps"] = f"{len(trained)} trained; rollouts in steps: {len(steps_of)}"
        outcome.facts["of those from the attacker"] = sum(group.startswith("evil.") for group, _ in steps_of)
    off = 0
    for env in sorted(accounts.keys() | ledger.keys()):
        there = ledger.get(env, EnvLedger())
        ours = accounts.get(env, {})
        wrong = [
            f"{getattr(there, fate)} {fate}, computed are {ours.get(fate, (0, 0))}"
            for fate in ("pending", "packed", "trained")
            if getattr(there, fate) != ours.get(fate, (0, 0))
        ]
        off += bool(wrong)
        if wrong and not any(line.startswith(f"I10 env {env}:") for line in named):
            findings.append(f"env {env}: the ledger has {'; '.join(wrong)}, and `verify` does not say so")
    outcome.facts["envs whose account is off, all named"] = off
    return findings


def _count(accounts: dict[str, dict[str, tuple[int, int]]], env: str, fate: str, rollouts: int, tokens: int) -> None:
    account = accounts.setdefault(env, {})
    before = account.get(fate, (0, 0))
    account[fate] = (before[0] + rollouts, before[1] + tokens)


def _said_wrong(home: Home) -> list[str]:
    """Lines of any process that speak of a defect, or of a process that was started again."""
    return [
        f"{path.name}: {line}"
        for path in sorted(home.path.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if any(words in line for words in (*BROKEN, *STARTED_AGAIN))
    ]
