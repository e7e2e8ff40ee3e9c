"""Workers: an env gives prompts and scores, a sampler gives tokens and logprobs, the loop pushes groups.

Nothing here imports torch until a sampler is made. An env of a known framework enters `envs`, a way to sample
`samplers`; what a trainer must know of a rollout belongs to `records`.
Open first: `loop`, then `groups_in_flight` and `group_maker`.
"""
