"""What is known of a run and its processes, and text that people read.

Pure: records and heartbeats come in; nothing is looked up here. A number of a record is a field with `metric(...)`.
Open first: `heartbeats`.
"""
