"""An env whose module raises: no worker can make it."""

KEY = {}["JUDGE_KEY"]


def make():
    """Never called."""
