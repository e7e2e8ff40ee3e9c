"""The data-parallel trainer: packed forward passes, losses over global counts, checkpoints, published versions.

Nearly everything here imports torch: import it lazily. A loss enters `losses` and gets its name, with the
settings that it reads, in `rlbuffer/config/losses`; a way to share a model enters `ranks`, a number that people
want to see `state/step_record`, and `reports/tally`, which counts it.
Open first: `loop`, then `session`.
"""
