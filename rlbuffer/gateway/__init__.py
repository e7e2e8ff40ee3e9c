"""The gateway: a base URL for each open rollout of an agent; every answer is on the server before the agent hears it.

No process of it keeps anything: each serves every call, several listen on one port, and what one of them left another
finishes. No template, tokenizer or tool parser is in here: engines render and parse. Open first: `history`, then
`splice`.
"""
