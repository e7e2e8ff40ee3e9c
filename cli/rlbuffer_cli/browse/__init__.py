"""The browser of `rlbuffer inspect` on a terminal: screens over the read API. Nothing here writes to the server.

Open first: `app`, `screen`, `listing`.
"""
