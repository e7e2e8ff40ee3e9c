"""Events of each process, as records: one union per producer, the JSON object of each, its lines for people.

A process hands its events to one function (`on_event`). ``--display json`` prints their objects, a narrator their
lines. An event enters at its producer's file, and mypy names every narrator that does not tell it yet.
Open first: `event`, then `batcher`.
"""
