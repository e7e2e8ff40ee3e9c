"""A Parquet file is read a few rows at a time, however many its writer put into a row group."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlbuffer.archive.groups import read_group_file, write_groups
from rlbuffer.testing import make_group

ROWS, TOKENS = 128, 2**14


def test_a_row_group_that_unpacks_to_much_is_never_in_memory_whole(tmp_path: Path) -> None:
    groups = [make_group(env="a", group_id=f"a.{n}", lengths=[TOKENS] * 4) for n in range(ROWS // 4)]
    file = tmp_path / "groups.parquet"
    write_groups(file, groups, run="r")
    pq.write_table(pq.read_table(file), file, row_group_size=ROWS)
    assert pq.ParquetFile(file).num_row_groups == 1
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in read_group_file(file)]
    assert len(held) == len(groups)
    assert max(held) < ROWS * TOKENS * 9  # all of it is nine bytes a token
