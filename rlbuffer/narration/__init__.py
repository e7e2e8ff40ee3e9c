"""The sentences that people read: why a step waits, and one line per event of each process.

Numbers and names come in, text goes out; nothing is looked up here. A new sentence of `serve`, `worker`, `train` or
`score` enters here.
Open first: `waiting`.
"""
