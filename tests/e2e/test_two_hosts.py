"""Two hosts without a shared filesystem: two network namespaces, and the second cannot see the folder of the first."""

from __future__ import annotations

import re
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from homes import Home

from rlbuffer.store.server.binary import find_binary

FIRST, SECOND = "10.231.87.1", "10.231.87.2"
TOKEN = "s3cret"


@dataclass
class Hosts:
    """`trainer` has the server, the batcher and the trainer; `sampler` has the workers."""

    trainer: Home
    sampler: Home


@pytest.fixture
def hosts(home: Home) -> Iterator[Hosts]:
    mark = uuid.uuid4().hex[:6]
    names, links = (f"rlb-{mark}-a", f"rlb-{mark}-b"), (f"r{mark}a", f"r{mark}b")
    other = Home(Path(tempfile.mkdtemp(prefix="rlb-")), home.parent)
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add {links[0]} netns {names[0]} type veth peer name {links[1]} netns {names[1]}"]
    for name, link, address in zip(names, links, (FIRST, SECOND), strict=True):
        commands += [
            f"-n {name} address add {address}/24 dev {link}",
            f"-n {name} link set {link} up",
            f"-n {name} link set lo up",
        ]
    try:
        for command in commands:
            try:
                made = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
            except FileNotFoundError:
                pytest.skip("network namespaces need the ip program (iproute2)")
            if made.returncode:
                pytest.skip(f"network namespaces are forbidden here: ip {command}: {made.stderr.strip()}")
        home.prefix = ("ip", "netns", "exec", names[0])
        # A filesystem of its own over the first host's folder: what is there cannot be read from the second.
        hide = f'mount -t tmpfs none {home.path} && exec "$@"'
        other.prefix = ("ip", "netns", "exec", names[1], "unshare", "--mount", "sh", "-c", hide, "sh")
        if subprocess.run([*other.prefix, "true"], capture_output=True, check=False).returncode:
            pytest.skip("mount namespaces are forbidden here: unshare --mount")
        yield Hosts(home, other)
    finally:
        other.stop()
        home.stop()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["rm", "-rf", str(other.path)], check=False)


def test_the_loop_trains_over_two_hosts_with_weights_over_http(hosts: Hosts) -> None:
    trainer, sampler = hosts.trainer, hosts.sampler
    settings = f"""
redis_url = "redis://{FIRST}:6379/0"

[weights]
listen = "0.0.0.0:9465"
url = "http://{FIRST}:9465"
"""
    for host in (trainer, sampler):
        config = host.config(world_size=1, steps=8)
        head, _, rest = config.read_text().partition("\n[server]")
        text = head + settings + "\n[server]" + rest.replace("max_age = 4", "max_age = 1")
        config.write_text(text)
        host.environment |= {"RLBUFFER_WEIGHTS_TOKEN": TOKEN, "RLBUFFER_CONFIG": str(config)}

    server = subprocess.Popen(
        [
            *trainer.prefix,
            find_binary().path,
            "--bind",
            FIRST,
            "--port",
            "6379",
            "--save",
            "",
            "--protected-mode",
            "no",
        ],
        cwd=trainer.path,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        trainer.start("serve", log="serve")
        train = trainer.start("train", "--display", "plain", log="train")
        workers = [sampler.start("worker", name, "--display", "plain", log=name) for name in ("vcopy", "repeat")]
        assert train.wait(timeout=240) == 0, trainer.logs() + sampler.logs()
        verified = trainer.call("verify", "--run", "tiny")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        for process in workers:
            process.terminate()
            assert process.wait(timeout=60) == 0, sampler.logs()
    finally:
        server.kill()
        server.wait()

    assert [record["step"] for record in trainer.metrics()] == list(range(1, 9))
    assert "policy versions are served at 0.0.0.0:9465 (http://127.0.0.1:9465 from here)" in trainer.logs()
    cache = sampler.path / "runs/tiny/weights-cache"
    kept = sorted(path.name for path in cache.iterdir() if path.name.startswith("v"))
    assert 1 < len(kept) < 5
    # Step 8 was sampled with version 6 or 7: max_age is 1.
    assert int(re.match(r"v(\d+)-", kept[-1])[1]) >= 6
    assert not (sampler.path / "runs" / "tiny" / "weights").exists()
