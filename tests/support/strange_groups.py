"""Groups with everything that a rollout may have, for tests that expect every byte of it back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.testing import make_group

TEXTS = ("", "\x00\x1b[31m<script>", "\u202egrüße \U0001f9ea\ufeff\u2028", "\ud7ff\ue000\uffff\U0010ffff", None)


def strange_group(group_id: str = "a.0", *, version: int = 0) -> Group:
    """A group of rollouts of every kind: an empty completion, named rewards, further columns of every dtype and shape,
    attachments, texts of any Unicode, metadata of every msgpack type."""
    dtypes = ("?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f2", "<f4", "<f8")
    columns = {f"c_{np.dtype(d).kind}{np.dtype(d).itemsize}": np.ones(5, d) for d in dtypes}
    columns |= {"topk": np.arange(30, dtype=np.float32).reshape(5, 3, 2) / 7, "none": np.zeros((5, 0), np.int32)}
    plain = Rollout.from_completion(
        prompt_ids=[1, 5], token_ids=[7, 9, 2], logprobs=[-0.1, -1e-7, -0.0], reward=1 / 3, policy_version=version
    )
    rich = replace(
        plain,
        rewards={"format": 0.1, "länge": -1e12},
        successes={"compiles": True, "passes": False},
        version_spans=(VersionSpan(version, 2, 4), VersionSpan(version + 1, 4, 5)),
        turns=(Turn("user", 0, 2, None, {"k": [1, None]}), Turn("assistant", 2, 2), Turn("werkzeug", 2, 5, 0.5)),
        finish_reason="length",
        is_truncated=True,
        columns=columns,
        attachments={"image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3), "scalar": np.float64(0.1), "empty": []},
        metadata={"bytes": b"\x00\xff", "$bytes": "no", "deep": {"$bytes": "x"}, "n": 2**64 - 1, "f": 1e-300, "": None},
    )
    empty = Rollout.from_completion(
        prompt_ids=[4], token_ids=[], logprobs=[], reward=None, policy_version=version, finish_reason="stop"
    )
    texts = [replace(plain, text=text, reward=float(i)) for i, text in enumerate(TEXTS)]
    rollouts = (rich, empty, *texts)
    return Group(
        group_id=group_id,
        env=group_id.split(".")[0],
        prompt_id="sieben mal acht gleich \u2026",
        rollouts=rollouts,
        planned_size=len(rollouts),
        answer={"x": [b"\x01", 5.0, 5]},
        metadata={"source": "ä", "$bytes": b"z"},
        worker="w-1",
        created=12.5,
        seconds=3.25,
    )


def usual_group(group_id: str, *, version: int = 0) -> Group:
    """A group as workers push it."""
    return make_group(env=group_id.split(".")[0], size=3, version=version, group_id=group_id, answer="8")
