"""The sentences that people read: why a step waits, what was probably meant; numbers as text.

Numbers and names come in, text goes out; nothing is looked up here. A sentence that several rooms say enters here; the
narrators of `events` tell the lines of what happens.
Open first: `waiting`.
"""
