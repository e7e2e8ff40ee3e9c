"""What agents speak: each dialect reads a request into an `AgentRequest`, and writes an answer in its own form.

Open first: `base`, then `chat`.
"""
