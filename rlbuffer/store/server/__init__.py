"""The server itself: its address, the connection that waits losses out, TLS, and the embedded one.

Nothing here knows of runs, except the names of the embedded server's files.
Open first: `connection`.
"""
