"""`rlbuffer run`: every process of a run on this machine, restarted when it dies.

The only room that knows all kinds of processes.
Open first: `supervisor`.
"""
