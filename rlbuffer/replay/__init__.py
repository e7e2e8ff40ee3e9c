"""Recorded steps again: an archive's steps for a trainer, without a server or workers.

`recorded_run` gives them to a trainer, ours or one of your own (:func:`reader`); `training` trains them and compares
with what the run did; `scoring` asks which version of the policy has sampled what. Open first: `training`.
"""

from rlbuffer.replay.recorded_run import reader

__all__ = ["reader"]
