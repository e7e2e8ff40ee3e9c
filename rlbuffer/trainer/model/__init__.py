"""The model: the packed forward pass, attention over segments, logprobs, LoRA, the self-test at the start.

Open first: `packed_policy`.
"""
