"""What every process of rlbuffer needs, whatever it does: signals, threads, heartbeats, locks, the forkserver.

Nothing here knows of rollouts, settings or the server.
Open first: `signals`.
"""
