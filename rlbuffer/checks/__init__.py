"""Everything that can be wrong before or while a run works, as one list of checks that say what to do.

A check is one function of `settings`, `host` or `server` under :func:`rlbuffer.checks.check.check`. What is wrong with
a single value is said by the record that has it (`rlbuffer.config`). Looks only, and changes nothing.
Open first: `check`, then `settings`.
"""
