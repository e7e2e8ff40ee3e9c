"""A worker with a planted failure: it says that it samples with weights that are four versions old.

python stale_worker.py HOME RUN
"""

import random
import sys
import time

import rlbuffer

VERSIONS_BEHIND = 4

with rlbuffer.connect(run=sys.argv[2], config={"home": sys.argv[1]}) as buffer:
    writer = buffer.writer("vcopy-old")
    while True:
        for ticket in writer.take("vcopy"):
            version = max(0, buffer.policy().current().version - VERSIONS_BEHIND)
            rollouts = [
                rlbuffer.Rollout.from_completion(
                    prompt_ids=[1, 2, 11],
                    token_ids=[random.randrange(10), 12],
                    logprobs=[-2.3, -0.1],
                    reward=float(i % 2),
                    policy_version=version,
                )
                for i in range(16)
            ]
            writer.push(
                rlbuffer.Group(
                    group_id=ticket.group_id,
                    env="vcopy",
                    prompt_id=f"old prompt {ticket.number % 4}",
                    rollouts=rollouts,
                    planned_size=16,
                )
            )
        time.sleep(0.2)
