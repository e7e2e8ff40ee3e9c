"""Checkpoints: written whole or not at all, and resumed to the bit.

Open first: `checkpoint`.
"""
