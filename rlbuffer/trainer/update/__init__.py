"""One optimizer update: slices of a step, schedules, gradients, ratios and times of the passes.

Open first: `update`.
"""
