"""The needs of every process of rlbuffer, whatever it does: signals, threads, heartbeats, locks, the forkserver.

Nothing here knows of rollouts, settings or the server.
Open first: `signals`.
"""
