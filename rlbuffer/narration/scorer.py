"""Sentences about scorers that more than one room prints."""

from __future__ import annotations


def gives_nothing(scorer: str) -> str:
    """The sentence about a scorer that adds nothing."""
    return f"score.{scorer} gives nothing: set model (a directory, or `initial`), or reward (package.module:function)"
