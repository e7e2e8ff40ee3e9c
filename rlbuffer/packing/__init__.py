"""Rollouts into rows, and rows into the arrays of a micro-batch.

Pure and numpy only: which rollouts a step has is decided already. `planner` deals them over ranks and rows,
`assembly` makes micro-batches of rows, `further_columns` agrees on columns beyond the fixed ones.
Open first: `planner`.
"""

from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.further_columns import register_column
from rlbuffer.packing.pack import pack
from rlbuffer.packing.planner import fewest_rows, plan, redeal

__all__ = ["PackItem", "assemble", "fewest_rows", "pack", "plan", "redeal", "register_column"]
