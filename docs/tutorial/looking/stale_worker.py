"""A worker with a planted failure: it asks for no ticket, and pushes what weights of four versions ago have sampled.

python stale_worker.py HOME RUN
"""

import random
import sys
import time
from itertools import count

import rlbuffer

VERSIONS_BEHIND = 4

with rlbuffer.connect(run=sys.argv[2], config={"home": sys.argv[1]}) as buffer:
    writer = buffer.writer("vcopy-old")
    for number in count():
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
        group_id, prompt = f"old.{time.time_ns()}", f"old prompt {number % 4}"
        group = rlbuffer.Group(group_id, "vcopy", prompt, rollouts, planned_size=16, worker=writer.worker)
        writer.push(group)
        time.sleep(0.3)
