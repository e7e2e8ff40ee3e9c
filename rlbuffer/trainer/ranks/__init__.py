"""Ranks among themselves: what they agree on, how they notice that one stands, FSDP and DDP.

Open first: `agreement`.
"""
