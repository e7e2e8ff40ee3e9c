"""The end of a rank, left as a file for the launcher, which knows ranks without importing what they train with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rlbuffer.process.files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The end of a rank by an error."""

    rank: int
    message: str
    exit_code: int
    is_final: bool
    """Starting again would end the same way: the error is one of rlbuffer's own."""
    is_consequence: bool
    """Another rank's end caused this one's."""
    trace: str = ""

    def write(self, directory: Path) -> None:
        """Leaves the report in `directory`."""
        write_whole(directory / f"rank-{self.rank}.json", json.dumps(asdict(self)))


def read_ends(directory: Path) -> list[RankEnd]:
    """The reports in `directory`, earliest first."""
    paths = sorted(directory.glob("rank-*.json"), key=lambda p: p.stat().st_mtime_ns)
    return [RankEnd(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
