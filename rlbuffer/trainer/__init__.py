"""The data-parallel trainer: packed forward passes, losses over global counts, checkpoints, published versions.

Everything here but this file and :mod:`rlbuffer.trainer.launch` imports torch; import it lazily.
"""
