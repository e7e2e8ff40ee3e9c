"""The scorer: adds to pending groups what they need before they can train.

`reference` computes logprobs under another model, packed; `rewards` asks a function of the user's own. torch and
transformers are imported by `reference` alone. Another kind of score enters as a file beside these two.
Open first: `loop`.
"""
