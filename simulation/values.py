"""Values of the modelled server's keys: streams and sorted sets. Hashes are dicts, strings are bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from redis.exceptions import ResponseError

StreamId = tuple[int, int]
LARGEST = 2**64 - 1


class Stream:
    """A stream: entries in the order of ids, and the last id ever given."""

    __slots__ = ("entries", "ids", "last")

    def __init__(self) -> None:
        self.ids: list[StreamId] = []
        self.entries: dict[StreamId, list[bytes]] = {}
        """id -> field, value, field, value ..."""
        self.last: StreamId = (0, 0)

    def copy(self) -> Stream:
        other = Stream()
        other.ids, other.entries, other.last = list(self.ids), dict(self.entries), self.last
        return other

    def add(self, entry_id: StreamId, fields: list[bytes]) -> None:
        if entry_id == (0, 0):
            raise ResponseError("The ID specified in XADD must be greater than 0-0")
        if entry_id <= self.last:
            raise ResponseError("The ID specified in XADD is equal or smaller than the target stream top item")
        self.ids.append(entry_id)
        self.entries[entry_id] = fields
        self.last = entry_id

    def remove(self, entry_id: StreamId) -> bool:
        if self.entries.pop(entry_id, None) is None:
            return False
        del self.ids[bisect_left(self.ids, entry_id)]
        return True

    def between(self, low: StreamId, high: StreamId) -> list[StreamId]:
        return self.ids[bisect_left(self.ids, low) : bisect_right(self.ids, high)]

    def after(self, entry_id: StreamId) -> list[StreamId]:
        return self.ids[bisect_right(self.ids, entry_id) :]


class SortedSet:
    """A sorted set: members by (score, member)."""

    __slots__ = ("order", "scores")

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.order: list[tuple[float, bytes]] = []

    def copy(self) -> SortedSet:
        other = SortedSet()
        other.scores, other.order = dict(self.scores), list(self.order)
        return other

    def set(self, member: bytes, score: float) -> bool:
        """Returns True when the member is new."""
        old = self.scores.get(member)
        if old is not None:
            if old == score:
                return False
            del self.order[bisect_left(self.order, (old, member))]
        self.scores[member] = score
        insort(self.order, (score, member))
        return old is None

    def remove(self, member: bytes) -> bool:
        score = self.scores.pop(member, None)
        if score is None:
            return False
        del self.order[bisect_left(self.order, (score, member))]
        return True

    def within(self, low: bytes, high: bytes) -> list[tuple[float, bytes]]:
        """Members with a score in the range, in Redis's notation: ``(5`` excludes, ``-inf``, ``+inf``."""
        least, is_least_out = bound(low)
        most, is_most_out = bound(high)
        return [
            item
            for item in self.order
            if (item[0] > least or (item[0] == least and not is_least_out))
            and (item[0] < most or (item[0] == most and not is_most_out))
        ]


def bound(text: bytes) -> tuple[float, bool]:
    """A limit of a range of scores, and whether it is itself left out."""
    is_out = text.startswith(b"(")
    try:
        return float(text[1:] if is_out else text), is_out
    except ValueError:
        raise ResponseError("min or max is not a float") from None


def stream_id(text: bytes, *, missing: int = 0) -> StreamId:
    """``5-3``, or ``5`` with the second half `missing`; ``-`` and ``+`` are the ends."""
    if text == b"-":
        return 0, 0
    if text == b"+":
        return LARGEST, LARGEST
    first, dash, second = text.partition(b"-")
    try:
        return int(first), int(second) if dash else missing
    except ValueError:
        raise ResponseError("Invalid stream ID specified as stream command argument") from None


def number_text(value: float) -> bytes:
    """A score as the server writes it."""
    if value == int(value) and abs(value) < 1e17:
        return b"%d" % int(value)
    return repr(value).encode()
