"""Each change of a run on the server, one module per concern: push, lease, commit, attempt, recovery ...

A module here calls scripts of `rlbuffer.store.scripts` and turns their replies into records.
Open first: `pool`.
"""
