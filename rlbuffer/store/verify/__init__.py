"""`verify`: the account of a run, read from the server and held against the invariants of docs/explain/protocol.md.

Open first: `verify`.
"""
