"""Files of groups as editors leave them."""

from __future__ import annotations

import io
import json

from rlbuffer_cli.commands.push import read_groups


def test_a_file_of_groups_that_begins_with_a_byte_order_mark_is_read() -> None:
    rollout = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0, -0.1], "reward": 1, "version_spans": [[0, 0, 2]]}
    line = json.dumps({"group_id": "e.1", "env": "e", "prompt_id": "1", "planned_size": 1, "rollouts": [rollout]})
    stream = io.BytesIO(line.encode("utf-8-sig"))
    assert [group.group_id for group in read_groups(stream, "groups.jsonl")] == ["e.1"]
