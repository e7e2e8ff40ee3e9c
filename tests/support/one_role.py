"""A worker or a rank that uses public names only, so that any version of rlbuffer runs it: ``python one_role.py ...``.

python one_role.py worker URL RUN        URL: "" for the embedded server
python one_role.py rank URL RUN LAST
"""

from __future__ import annotations

import sys

import numpy as np

import rlbuffer


def work(buffer: rlbuffer.Buffer) -> None:
    """Samples made-up rollouts until it is killed."""
    writer = buffer.writer("w")
    while True:
        for ticket in writer.take("a"):
            version = buffer.policy().current().version
            rollouts = [
                rlbuffer.Rollout.from_completion(
                    prompt_ids=np.arange(4),
                    token_ids=np.arange(6 + i),
                    logprobs=np.full(6 + i, -1.0, np.float32),
                    reward=float(i),
                    policy_version=version,
                )
                for i in range(2)
            ]
            group = rlbuffer.Group(
                group_id=ticket.group_id, env="a", prompt_id=str(ticket.number), rollouts=rollouts, planned_size=2
            )
            writer.push(group)


def train(buffer: rlbuffer.Buffer, last: int) -> None:
    """Acknowledges the steps up to `last`, announcing each version."""
    reader = buffer.reader(0, 1, timeout_seconds=60)
    for step in reader.steps():
        assert sum(int(m.loss_mask.sum()) for m in step) == step.normalizers.loss_tokens
        assert step.damaged == ()
        buffer.policy().announce(step.number, location="/nowhere", size=1, checksum="0" * 64)
        reader.trained(step)
        print("trained", step.number, flush=True)
        if step.number >= last:
            break


def main(role: str, url: str, run: str, last: str = "0") -> None:
    with rlbuffer.connect(url or None, run=run) as buffer:
        work(buffer) if role == "worker" else train(buffer, int(last))


if __name__ == "__main__":
    main(*sys.argv[1:])
