"""The front door: `connect()` gives a Buffer, and a Buffer gives writers, readers, the policy and views of a run.

Everything that a user's own worker or trainer calls lives here. Waiting, retries and progress enter; decisions do not.
Open first: `buffer`.
"""

from rlbuffer.client.buffer import Buffer, Policy, connect
from rlbuffer.client.details import GroupDetail
from rlbuffer.client.group_view import GroupView
from rlbuffer.client.reader import Reader
from rlbuffer.client.step_view import StepView
from rlbuffer.client.stream import Stream, Taken
from rlbuffer.client.writer import Writer
from rlbuffer.store.records import Ledger, Report

__all__ = [
    "Buffer",
    "GroupDetail",
    "GroupView",
    "Ledger",
    "Policy",
    "Reader",
    "Report",
    "StepView",
    "Stream",
    "Taken",
    "Writer",
    "connect",
]
