"""The trainer's reports: records per step, sinks, examples for people, model FLOPs.

Open first: `reports`.
"""
