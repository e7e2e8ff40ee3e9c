"""The files of an archive: their names, and the columns of each.

A step is archived when a file of steps holds it; its rollouts lie in the file of the same name that begins with
``rollouts``, which is there before. Likewise a record of the history and ``dropped``. Names::

    steps-EPOCH-FIRST-LAST-DIGEST.parquet       one row per step; DIGEST: the first 12 digits of the last one's
    rollouts-EPOCH-FIRST-LAST-DIGEST.parquet    one row per rollout of those steps
    history-FIRST-LAST.parquet                  one row per record: drops, commits, steps taken back, attempts
    dropped-FIRST-LAST.parquet                  one row per rollout of those drops that was still on the server
    trained-FIRST-LAST.parquet                  one row per record of the trainer
    settings-REVISION.parquet                   one row: the batcher's settings
    pending.parquet                             one row per rollout that was pending when a leader left, without payload
    tickets.parquet                             one row per ticket that was out then
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

ARCHIVE_FORMAT = 5
"""Grows when a file's columns change."""
READ_FORMATS = (4, 5)
"""Those whose columns mean the same; every other one is refused."""
ADDED_COLUMNS = ("entry_id", "seconds")
"""Columns of rollouts that a file of format 4 lacks: they read as None."""
LACKS_OF_FORMAT_4 = (
    "the pool entry of each push (entry_id)",
    "its seconds since its ticket (seconds)",
    "what the leader had read when it decided on a step, and when that was (read, decided)",
    "the trainer's settings (attempts)",
    "what was pending when the leader left (pending), and which tickets were out (tickets_out)",
)
PENDING_FILE, TICKETS_FILE = "pending.parquet", "tickets.parquet"
"""Written anew by every leader that leaves; a leader that is killed leaves that of the one before."""
FORMAT_KEY, RUN_KEY = b"rlbuffer.archive", b"rlbuffer.run"
"""In each file's metadata: the format, and the name of the run."""

_ARRAYS = pa.list_(
    pa.struct([("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.binary())])
)

STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("epoch", pa.int64()),
        ("digest", pa.string()),
        ("previous_digest", pa.string()),
        ("committed_ms", pa.int64()),
        ("revision", pa.int64()),
        ("world_size", pa.int32()),
        ("rollouts", pa.int64()),
        ("tokens", pa.int64()),
        ("reward", pa.float64()),
        ("age", pa.float64()),
        ("max_age", pa.int64()),
        ("fill", pa.float64()),
        ("closed_by", pa.string()),
        ("group_ids", pa.list_(pa.string())),
        ("header", pa.binary()),
        ("parts", pa.list_(pa.binary())),
    ]
)

ROLLOUTS = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),
        ("place", pa.int32()),
        ("history_id", pa.string()),
        ("group_id", pa.string()),
        ("env", pa.string()),
        ("adapter", pa.string()),
        ("prompt_id", pa.string()),
        ("planned_size", pa.int64()),
        ("worker", pa.string()),
        ("payload_key", pa.string()),
        ("index", pa.int32()),
        ("sequence", pa.int32()),
        ("pushed_ms", pa.int64()),
        ("entry_id", pa.string()),
        ("seconds", pa.float64()),
        ("advantage", pa.float64()),
        ("rollout_id", pa.string()),
        ("length", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("loss_tokens", pa.int64()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("min_version", pa.int64()),
        ("max_version", pa.int64()),
        ("finish_reason", pa.string()),
        ("is_truncated", pa.bool_()),
        ("size", pa.int64()),
        ("checksum", pa.int64()),
        ("problem", pa.string()),
        ("left_out", pa.string()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("columns", _ARRAYS),
        ("attachments", _ARRAYS),
        ("details", pa.binary()),
        ("group_payload", pa.binary()),
        ("needs", pa.list_(pa.string())),
        ("created", pa.float64()),
        ("raw", pa.binary()),
    ]
)

HISTORY = pa.schema(
    [
        ("history_id", pa.string()),
        ("at_ms", pa.int64()),
        ("kind", pa.string()),
        ("group_id", pa.string()),
        ("env", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("rollouts", pa.int64()),
        ("tokens", pa.int64()),
        ("reward", pa.float64()),
        ("min_version", pa.int64()),
        ("record", pa.string()),
        ("is_cut", pa.bool_()),
    ]
)

TRAINED = pa.schema(
    [
        ("record_id", pa.string()),
        ("at_ms", pa.int64()),
        ("step", pa.int64()),
        ("epoch", pa.int64()),
        ("digest", pa.string()),
        ("record", pa.string()),
        ("is_cut", pa.bool_()),
    ]
)

SETTINGS = pa.schema(
    [("revision", pa.int64()), ("epoch", pa.int64()), ("digest", pa.string()), ("config", pa.string())]
)

TICKETS = pa.schema([("env", pa.string()), ("number", pa.int64()), ("version", pa.int64()), ("seconds", pa.float64())])

_STEPS_NAME = re.compile(r"(steps|rollouts)-(\d+)-(\d+)-(\d+)-([0-9a-f]{12})\.parquet\Z")
_HISTORY_NAME = re.compile(r"(history|dropped|trained)-(\d+)\.(\d+)-(\d+)\.(\d+)\.parquet\Z")


class StepsName(NamedTuple):
    """The fields of the name of a file of steps."""

    epoch: int
    first: int
    last: int
    digest: str
    """First 12 digits of the last step's."""

    def file(self, kind: str = "steps") -> str:
        """The file's name; `kind` is ``steps`` or ``rollouts``."""
        return f"{kind}-{self.epoch}-{self.first:08d}-{self.last:08d}-{self.digest}.parquet"


def steps_names(folder: Path) -> list[StepsName]:
    """The files of steps in `folder`, by epoch and first step."""
    matches = (_STEPS_NAME.match(path.name) for path in folder.glob("steps-*.parquet"))
    return sorted(StepsName(int(m[2]), int(m[3]), int(m[4]), m[5]) for m in matches if m)


def history_file(kind: str, first: str, last: str) -> str:
    """The name of a file of the history; `kind` is ``history``, ``dropped`` or ``trained``, ids are the stream's."""
    return f"{kind}-{first.replace('-', '.')}-{last.replace('-', '.')}.parquet"


def history_names(folder: Path, kind: str = "history") -> list[tuple[tuple[int, int], tuple[int, int], str]]:
    """(first id, last id, file name) of the files of the history, or of the trainer's records, in their order."""
    matches = (_HISTORY_NAME.match(path.name) for path in folder.glob(f"{kind}-*.parquet"))
    return sorted(((int(m[2]), int(m[3])), (int(m[4]), int(m[5])), m.string) for m in matches if m)


def settings_file(revision: int) -> str:
    """The name of the file of a revision of the settings."""
    return f"settings-{revision:08d}.parquet"


def described(schema: Any, run: str) -> Any:
    """`schema` with the archive's own metadata."""
    return schema.with_metadata({FORMAT_KEY: str(ARCHIVE_FORMAT).encode(), RUN_KEY: run.encode()})
