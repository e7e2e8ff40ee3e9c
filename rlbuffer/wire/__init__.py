"""Records as bytes: payloads, a group's metadata, and the JSON lines of `rlbuffer push`.

Everything that is read here may come from a stranger: every length and depth is bounded before it is believed.
The bytes of a format may enter; what a record means, and where it is stored, may not.
Open first: `payload`.
"""
