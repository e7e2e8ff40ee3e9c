"""The data-parallel trainer: packed forward passes, losses over global counts, checkpoints, published versions.

Nearly everything here imports torch: import it lazily. A loss enters `losses`, gets its name in `losses/registry` and
says in `rlbuffer/config/losses` which settings it reads; a way to share a model enters `ranks`, a number that people
want to see `reports`.
Open first: `loop`, then `session`.
"""
