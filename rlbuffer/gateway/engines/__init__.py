"""Engines as the gateway asks them: a conversation in, token ids out; a prompt in, a sampled answer out.

Open first: `base`, then `vllm`.
"""
