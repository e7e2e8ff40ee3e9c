"""What a trainer says of itself: records per step, sinks, examples for people, model FLOPs.

Open first: `reports`.
"""
