"""The server itself: its address, the connection that waits losses out, TLS, and the embedded one.

Nothing here knows of runs, but for what the embedded server's files are called.
Open first: `connection`.
"""
