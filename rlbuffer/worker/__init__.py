"""Workers: an env gives prompts and scores, a sampler gives tokens and logprobs, the loop pushes groups.

Nothing here imports torch until a sampler is made.
"""
