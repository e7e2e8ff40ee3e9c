"""One optimizer update: slices of a step, gradients, ratios and times of the passes.

Open first: `update`.
"""
