"""The needs of every process of rlbuffer, whatever it does: signals, threads, heartbeats, locks, the forkserver.

Nothing here knows of settings or the server.
Open first: `signals`.
"""
