"""Payloads that are viewed together are taken exactly when each would be alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import msgpack
import numpy as np
from wounds import HEADER, false_payload, mutated, packed, resealed, with_details

from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.rollout import RolloutArrays
from rlbuffer.records.spans import VersionSpan
from rlbuffer.testing import make_group
from rlbuffer.wire.payload import encode_push, payload_checksum
from rlbuffer.wire.views import ANNOUNCED, Announced, view_rollout, view_rollouts

MUTATIONS = 2_000


def plain_payloads() -> dict[bytes, RolloutInfo]:
    """Payloads without further arrays and text, and what their pushes announce."""
    group = make_group(env="math", lengths=[5, 16, 9, 7, 8, 33], version=7)
    spans = [(VersionSpan(7, 1, 4), VersionSpan(8, 4, r.length)) if i % 2 else r.version_spans for i, r in
             enumerate(group.rollouts)]  # fmt: skip
    masks = [r.loss_mask if i % 3 else r.loss_mask & (np.arange(r.length) < r.length - 1)
             for i, r in enumerate(group.rollouts)]  # fmt: skip
    its = [replace(r, version_spans=spans[i], loss_mask=masks[i]) for i, r in enumerate(group.rollouts)]
    push = encode_push(replace(group, rollouts=tuple(its)))
    return dict(zip(push.payloads, push.info.rollouts, strict=True))


def together(claims: Sequence[tuple[bytes, RolloutInfo]]) -> list[RolloutArrays | None]:
    rows = np.array([tuple(getattr(info, name) for name in Announced._fields) for _, info in claims], ANNOUNCED)
    return view_rollouts([data for data, _ in claims], rows)


def same_arrays(one: RolloutArrays, other: RolloutArrays) -> bool:
    arrays = all(a.tobytes() == b.tobytes() for a, b in zip(one[:3], other[:3], strict=True))
    return arrays and one.version_spans == other.version_spans and bytes(one.payload) == bytes(other.payload)


def test_a_payload_is_viewed_only_as_its_push_announced_it() -> None:
    known = plain_payloads()
    for data, info in known.items():
        views, found = view_rollout(data, info), together([(data, info)])[0]
        assert views is not None
        assert found is not None
        assert same_arrays(views, found)
        others = [other for other in known.values() if other is not info]
        assert together([(data, other) for other in others]) == [None] * len(others)
        assert together([(data, replace(other, size=info.size, length=info.length)) for other in others]) == [
            None
        ] * len(others)
    rng = random.Random(9)
    for i in range(MUTATIONS // 20):
        claims = []
        for _ in range(20):
            data, other = rng.sample([*known], 2)
            wounded = mutated(rng, data, other) if rng.random() < 0.8 else data
            claims.append((wounded if rng.random() < 0.5 else resealed(wounded), known[data]))
        are_whole = [known.get(data) is info for data, info in claims]
        assert [found is not None for found in together(claims)] == are_whole, f"in claims {i}"


def test_a_payload_whose_metadata_lie_with_it_is_viewed_together_if_it_would_be_alone() -> None:
    known = plain_payloads()
    rng, sound, refused = random.Random(10), 0, 0
    for i in range(MUTATIONS // 10):
        claims = []
        for n in range(10):
            data, other = rng.sample([*known], 2)
            wounded = false_payload(rng, data, other, n)
            claims.append((wounded, replace(known[data], size=len(wounded), checksum=payload_checksum(wounded))))
        for (data, info), found in zip(claims, together(claims), strict=True):
            views = view_rollout(data, info)
            assert (views is None) == (found is None), f"a payload of claims {i}"
            assert views is None or found is None or same_arrays(views, found)
            sound, refused = sound + (found is not None), refused + (found is None)
    assert min(sound, refused) > MUTATIONS // 10


LIES: tuple[dict[str, int], ...] = (
    *({name: by} for name in ("prompt_tokens", "loss_tokens", "min_version", "max_version") for by in (-1, 1)),
    {"prompt_tokens": -2},
    {"prompt_tokens": -2, "loss_tokens": 2},
    {"min_version": -1, "max_version": -1},
)


def test_a_payload_with_a_single_span_is_viewed_together_if_it_would_be_alone() -> None:
    """Alone, and beside others."""
    group = make_group(env="math", lengths=[9, 16], version=7)
    push = encode_push(group)
    claims = [*zip(push.payloads, push.info.rollouts, strict=True)]
    for (data, info), rollout in zip([*claims], group.rollouts, strict=True):
        changes = [{name: getattr(info, name) + by for name, by in lie.items()} for lie in LIES]
        claims += [(data, replace(info, **change)) for change in changes if min(change.values()) >= 0]
        details = msgpack.unpackb(data[HEADER.size : HEADER.size + HEADER.unpack_from(data)[3]])
        length, prompt = rollout.length, rollout.prompt_tokens
        starts, ends = (-1, 0, 1, prompt, prompt + 1, length), (0, 1, prompt, length - 1, length, length + 1)
        for span in [(v, s, e) for v in (6, 7, -7, 2**70) for s in starts for e in ends]:
            spanned = with_details(data, packed([*details[:6], [*span], *details[7:]]))
            claims.append((spanned, replace(info, size=len(spanned), checksum=payload_checksum(spanned))))
        at = data.index(rollout.loss_mask.tobytes())
        for first, mark in ((0, 1), (prompt - 1, 1), (prompt, 0), (length - 1, 0)):
            marked = bytearray(data)
            marked[at + first] = mark
            sealed = resealed(bytes(marked))
            for prompts in (0, prompt - 1, prompt, prompt + 1):
                claimed = replace(info, prompt_tokens=prompts, checksum=payload_checksum(sealed))
                trained = info.loss_tokens + (1 if mark else -1)
                claims += [(sealed, claimed), (sealed, replace(claimed, loss_tokens=trained))]
            if (first, mark) == (0, 1):  # a first token that is trained, in a span
                sealed = with_details(sealed, packed([*details[:6], [7, 0, length], *details[7:]]))
                claimed = replace(info, prompt_tokens=0, loss_tokens=info.loss_tokens + 1, size=len(sealed))
                claims.append((sealed, replace(claimed, checksum=payload_checksum(sealed))))
        untrained = bytearray(data)
        untrained[at : at + length] = bytes(length)
        for start in (1, length):
            spanned = with_details(bytes(untrained), packed([*details[:6], [7, start, length], *details[7:]]))
            claimed = replace(info, prompt_tokens=length, loss_tokens=0, size=len(spanned))
            claims.append((spanned, replace(claimed, checksum=payload_checksum(spanned))))
    are_viewed = [view_rollout(data, info) is not None for data, info in claims]
    assert [found is not None for found in together(claims)] == are_viewed
    assert [together([claim])[0] is not None for claim in claims] == are_viewed
    assert 10 < sum(are_viewed) < len(claims) / 2


def test_every_flipped_bit_of_a_payload_is_found_among_many() -> None:
    data, info = next(iter(plain_payloads().items()))
    flipped = [bytearray(data) for _ in range(8 * len(data))]
    for bit, its in enumerate(flipped):
        its[bit // 8] ^= 1 << bit % 8
    assert together([(bytes(its), info) for its in flipped]) == [None] * len(flipped)
