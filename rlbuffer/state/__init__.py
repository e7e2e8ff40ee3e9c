"""What is known of a run and its processes, and text that people read.

Pure: records and heartbeats come in; nothing is looked up here.
Open first: `heartbeats`.
"""
