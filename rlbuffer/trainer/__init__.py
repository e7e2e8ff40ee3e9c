"""The data-parallel trainer: packed forward passes, losses over global counts, checkpoints, published versions.

Everything here but this file, `launch`, `loss_table` and `schedules` imports torch; import it lazily.
"""
