"""The things that every room talks about: rollouts, groups, policy versions, step plans, micro-batches.

Frozen dataclasses over numpy arrays, checked when they are made. No server, no settings, no bytes.
A record that many rooms must agree on may enter; one that a single room knows stays there.
Open first: `rollout`, then `group`.
"""

from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group, Pushed, Ticket
from rlbuffer.records.info import GroupInfo, RolloutInfo
from rlbuffer.records.micro_batch import MicroBatch, Padded, Sample, Step, WholeSample
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.records.states import ClosedBy, PushStatus, Reason, State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import AdapterProgress, Decision, Drop, Normalizers, Plan, StepPlan

__all__ = [
    "AdapterProgress",
    "ClosedBy",
    "Decision",
    "Drop",
    "Failure",
    "Group",
    "GroupInfo",
    "MicroBatch",
    "Normalizers",
    "Padded",
    "Plan",
    "PolicyVersion",
    "PushStatus",
    "Pushed",
    "Reason",
    "Rollout",
    "RolloutInfo",
    "Sample",
    "State",
    "Step",
    "StepHeader",
    "StepPlan",
    "Ticket",
    "TokenSequence",
    "Turn",
    "VersionSpan",
    "WholeSample",
]
