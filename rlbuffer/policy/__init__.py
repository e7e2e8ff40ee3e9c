"""The batcher's decisions, pure: age, groups, budget, selection, closing, composing, admission, waiting."""
