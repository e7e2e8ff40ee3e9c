"""The commands that README and docs show: which of them run in the tests and what they then say, and why others do not.

A block without a language, or of `sh`, is commands; what is none is a block of `text`.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "log.md")]
FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

SHIPPED_ENDS = {
    "rlbuffer inspect": (0, "rollouts: "),
    "rlbuffer inspect --where 'env:vcopy state:ready'": (0, ""),
    "rlbuffer inspect vcopy.120": ((0, 1), "vcopy.120"),  # it may be retired, or not be sampled yet
    "rlbuffer inspect --plain --where 'state:ready'": (0, ""),
    "rlbuffer inspect --where 'env:math state:trained step:40 rollout.reward<0.1'": (0, ""),
    "rlbuffer inspect --where 'stop:length text:/final answer/i'": (0, ""),
    "rlbuffer inspect --where 'step:40 truncated:yes' --html cut.html": (0, "cut.html"),
    "rlbuffer inspect --steps": (0, "closed by"),
    "rlbuffer inspect --workers": (0, "worker vcopy"),
    "rlbuffer inspect --where 'state:dropped reason:stale' --plain": (0, ""),
    "rlbuffer inspect math.7": (1, "math.7"),
    "rlbuffer export --where 'reward>=1' -o good.parquet": (0, "good.parquet"),
    "rlbuffer verify": (0, "ok: everything adds up"),
    "rlbuffer doctor": (0, "server "),
    "rlbuffer top --once": (0, "  rates "),
    "rlbuffer plot reward": (0, "step 1"),
    "rlbuffer plot rewards -o rewards.html": (0, "wrote rewards.html"),
    "rlbuffer plot drops": ((0, 1), ""),  # a short run may have dropped nothing
    "rlbuffer config explain batcher.max_age": (0, "value     1   (rlbuffer.toml:"),
    "rlbuffer config init mine.toml": (0, "wrote mine.toml"),
    "rlbuffer runs list": (0, "default "),
    "rlbuffer inspect --alive batcher": (0, "batcher"),
    "rlbuffer config apply --config new.toml": (0, "batcher.max_age: 1 -> 2"),
    "rlbuffer env pause math": (1, "knows no env 'math'. It knows "),
    "rlbuffer env done math": (1, "knows no env 'math'. It knows "),
    "rlbuffer drop --where 'env:math age>=2'": (0, "no pending group of run "),
    "rlbuffer drain": (0, 'run "default" is drained after step '),
    "rlbuffer runs dump math.dump": (1, " leads run 'default'"),
    "rlbuffer runs void 120": (1, "the trainer of run 'default' was seen "),
    "rlbuffer runs rewind 100": (1, "the trainer of run 'default' was seen "),
    "rlbuffer runs reset old-run --yes": (0, "old-run"),
}
"""In their order, beside a run of the file that comes along -> exit code and a part of what they print."""
SHIPPED_LASTS = {
    "rlbuffer serve": 'serving run "default" from step 0',
    "rlbuffer worker vcopy": "sampling with policy version 0",
    "rlbuffer worker repeat": "sampling with policy version 0",
    "rlbuffer train --world-size 2": "step 1 ",
    "rlbuffer score --model ~/models/base": "gives ref_logprobs",
}
"""Those that go on until they are stopped -> what they print when they are at work."""
DOCS_LASTS = {
    "rlbuffer serve --run RUN": 'serving run "math" from step 0',
    "rlbuffer worker --env parity:Parity --run RUN": "waiting for 5 s: ",
    "rlbuffer score --model ~/models/qwen3-0.6b --run math": "gives ref_logprobs",
    "rlbuffer score --reward my_judge.api:reward --env essays": "gives reward",
    "rlbuffer weights serve --listen 0.0.0.0:9466 --upstream http://trainer-0:9465": ", from http://trainer-0:9465",
}
DOCS_ENDS = {
    "rlbuffer config check --config rlbuffer.toml": (0, "ok: rlbuffer.toml"),
    "rlbuffer config apply --config rlbuffer.toml --run math": (0, "has these settings "),
    "rlbuffer drop --where 'worker:inf-3 reward<0.01' --run math": (0, "no pending group of run "),
    "rlbuffer runs void 120 --run math": (1, "has no step 120: the last committed one is 0"),
    "rlbuffer runs rewind 100 --run math": (1, "has no step 100: the last committed one is 0"),
    "rlbuffer drain --run math --timeout 900": (0, 'run "math" is drained after step 0'),
    "rlbuffer runs dump math.dump --run math": (1, " leads run 'math'"),
    "rlbuffer runs restore math.dump --redis redis://new-host:6379": (1, "cannot read math.dump"),
    "rlbuffer verify --run math --redis redis://new-host:6379": (1, "there is no run 'math'"),
    "rlbuffer weights serve": (3, "where should it listen? Give --listen HOST:PORT, or set weights.listen"),
    "rlbuffer train --fake-data --steps 20": (0, "finished at step 20"),
}
"""Beside `rlbuffer serve --run math` and a file with no more than a tiny model in it."""

TWO_HOSTS = "several hosts and their names; the same processes on one: tests/e2e/test_two_hosts.py, test_roles.py"
ARCHIVE = "a folder outside this one; the same with another: tests/e2e/test_archive.py"
PAIR = "ids of a run that is not here; of one that is: tests/integration/cli/test_plain_twins.py, test_html.py"
VLLM = "vLLM, on GPUs; on CPUs: tests/real_vllm"
INSTALLS = "it installs packages"
DEPLOYS = "a cluster, or files of a host: tests/packaging/test_deploy_files.py, tests/e2e/test_slurm.py"
EXAMPLE = "run as it is, until the reward rises, by tests/e2e/test_own_trainers.py"
NOT_HERE = {
    "rlbuffer serve --archive /data/math": ARCHIVE,
    "rlbuffer verify --archive /data/math": ARCHIVE,
    "rlbuffer inspect math.120/3 --archive /data/math": ARCHIVE,
    "rlbuffer export --archive /data/math --where 'env:math reward>=1' -o good.parquet": ARCHIVE,
    "rlbuffer push good.parquet --run another": ARCHIVE,
    "rlbuffer export --archive /data/math --where 'step:40' -o step.html": ARCHIVE,
    "rlbuffer plot entropy /data/math": ARCHIVE,
    "rlbuffer export --archive /data/math -o recorded.jsonl": ARCHIVE,
    "rlbuffer push recorded.jsonl --run again --version current --done": "a file that is not here; with another: "
    "tests/e2e/test_push_command.py",
    "rlbuffer inspect math.7/3 --with math.7/5": PAIR,
    "rlbuffer inspect math.7/3 --html worst.html": PAIR,
    "rlbuffer inspect --web": "it serves until it is stopped: tests/integration/cli/test_web.py",
    "ssh -L 9000:127.0.0.1:9000 host rlbuffer inspect --web --port 9000": TWO_HOSTS,
    "make demo": f"{INSTALLS}; `rlbuffer demo` is run by tests/e2e/test_deterministic_demo.py",
    "make test": f"{INSTALLS}, and would run itself",
    "rlbuffer train --world-size 2 --config rlbuffer.toml": "`rlbuffer train` of the first run reads the same",
    "rlbuffer train --debug-samples 2": "on made-up steps: tests/e2e/test_train_command.py",
    "torchrun --nproc-per-node 8 -m rlbuffer.trainer rlbuffer.toml": "eight ranks; fewer: tests/e2e/test_ddp.py",
    "torchrun --nproc-per-node 2 plain_loop.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR STEPS": EXAMPLE,
    "torchrun --nproc-per-node 2 hf_trainer.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR STEPS": EXAMPLE,
    "accelerate launch accelerate_loop.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR STEPS": EXAMPLE,
    "accelerate launch trl_grpo.py redis://host:6379 RUN MODEL_DIR OUTPUT_DIR STEPS": (
        "TRL, in an environment of its own: `make adapters-test`"
    ),
    "rlbuffer run rlbuffer.toml": f"a file for {VLLM}; others: tests/e2e/test_kills.py",
    "rlbuffer train --world-size 8": TWO_HOSTS,
    "RLBUFFER_REDIS_URL=redis://operator@redis:6379/0 rlbuffer serve": TWO_HOSTS,
}
"""Command -> why no test of this file runs it."""
NOT_HERE_BEGINNINGS = {
    "pip install ": INSTALLS,
    "python3 -m venv ": INSTALLS,
    "python3.11 -m venv ": INSTALLS,
    "export ": "it sets variables; that rlbuffer knows them: the test of names below",
    "torchrun --nnodes 2 ": TWO_HOSTS,
    "valkey-server --bind ": "a server's own command; with these settings: tests/support/own_server.py",
    "for i in 0 1 2 3; do /opt/vllm/": VLLM,
    "VLLM_": VLLM,
    "make bench": f"{INSTALLS}, and takes minutes; docs/log.md has the figures",
    "python -m benchmarks ": "minutes on a quiet machine; docs/log.md has the figures",
    "cp -r deploy/kubernetes ": DEPLOYS,
    "rlbuffer config init mine/": DEPLOYS,
    "openssl rand ": DEPLOYS,
    "kubectl ": DEPLOYS,
    "TRAINERS=": DEPLOYS,
    "install -m ": DEPLOYS,
    "echo RLBUFFER_REDIS_URL=": DEPLOYS,
    "systemctl ": DEPLOYS,
    "docker compose ": "Docker; what the files say: tests/packaging/test_compose.py",
    'echo "RLBUFFER_REDIS_PASSWORD=': "Docker; what the files say: tests/packaging/test_compose.py",
}
"""The same, by how commands begin."""


def commands() -> list[tuple[str, str]]:
    """Page and line of its block, and command, of all pages, in one line, without comments and the folder of the
    program."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            if block[2] not in ("", "sh", "bash", "shell", "console"):
                continue
            place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 1}"
            for line in re.sub(r"\\\n\s*", "", block[3]).splitlines():
                command = re.sub(r"(^|\s+)#.*$", "", line).strip().removeprefix(".venv/bin/")
                if command:
                    found.append((place, command))
    return found


def why_not_here(command: str) -> str:
    """Reason why no test here runs it; "" where one does, or nothing is known of it."""
    beginnings = (reason for beginning, reason in NOT_HERE_BEGINNINGS.items() if command.startswith(beginning))
    return NOT_HERE.get(command) or next(beginnings, "")
