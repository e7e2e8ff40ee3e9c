"""Broken Lua files: each takes one check away. The simulation must find every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """An exact replacement in one Lua file."""

    name: str
    script: str
    old: str
    new: str
    profile: str = ""
    """The profile of faults under which it matters most."""
    asks: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the plan under which it matters."""
    also: tuple[tuple[str, str], ...] = ()
    """Further replacements in the same file, when two checks guard the same."""

    def applied(self, text: str) -> str:
        """The broken text of `script`; any other file as it is."""
        if text != source(self.script):
            return text
        for old, new in ((self.old, self.new), *self.also):
            if text.count(old) != 1:
                raise ValueError(f"mutation {self.name}: {old!r} is {text.count(old)} times in {self.script}.lua")
            text = text.replace(old, new)
        return text


def source(script: str) -> str:
    """A Lua file as it is."""
    return (resources.files("rlbuffer.store") / "scripts" / f"{script}.lua").read_text(encoding="utf-8")


def _of(
    name: str,
    script: str,
    old: str,
    new: str,
    profile: str = "",
    also: tuple[tuple[str, str], ...] = (),
    **asks: Any,
) -> Mutation:
    return Mutation(name=name, script=script, old=old, new=new, profile=profile, asks=asks, also=also)


def _opened(name: str, script: str, old: str, new: str, profile: str = "", **asks: Any) -> Mutation:
    """One of the scripts of open rollouts."""
    return _of(name, script, old, new, profile, **{"tickets": True, "gateways": 2, "agents": 3, **asks})


MUTATIONS: tuple[Mutation, ...] = (
    _of(
        "no-sequence-check",
        "push",
        "if sequence <= last then",
        "if false then",
        "network",
    ),
    _of("push-in-any-epoch", "push", "if epoch ~= producer_epoch then", "if not epoch then", "network", reset=True),
    _of(
        "commit-with-any-token",
        "commit",
        "if lease[3] ~= token or tonumber(lease[2] or '0') < now then",
        "if tonumber(lease[2] or '0') < now then",
        "halts",
        batchers=2,
        slow=0.1,
    ),
    _of(
        "commit-after-the-lease",
        "commit",
        "if lease[3] ~= token or tonumber(lease[2] or '0') < now then",
        "if lease[3] ~= token then",
        "halts",
        batchers=1,
    ),
    _of("commit-what-is-gone", "commit", "if #gone > 0 then", "if #gone > 9 then", operator=True),
    _of("commit-without-tombstone", "commit", "in_batches('ZADD', closed_key, closed)", ""),
    _of(
        "commit-sweeps-at-once",
        "commit",
        "add(garbage, number, payloads[i])",
        "add(garbage, 0, payloads[i])",
    ),
    _of("commit-leaves-the-pool", "commit", "in_batches('XDEL', pool_key, ids)", ""),
    _of(
        "tombstones-by-time-alone",
        "commit",
        "tonumber(steps) + step - oldest",
        "1",
        "late",
        careless=0.6,
        tickets=False,
        clock_steps=((0.3, 3700.0), (0.5, 3700.0), (0.7, 3700.0)),
    ),
    _of("push-expires", "push", "redis.call('PERSIST', payload)", ""),
    _of(
        "push-without-payload",
        "push",
        "if stored ~= '' and redis.call('EXISTS', stored) == 0 then return {'MISSING'} end",
        "",
        also=(("  redis.call('RENAME', stored, payload)\n  redis.call('PERSIST', payload)\n", ""),),
    ),
    _of("drop-without-tombstone", "drop", "if closes == '1' then", "if closes == '2' then"),
    _of(
        "drop-without-xdel",
        "drop",
        "if #found == 1 and redis.call('XDEL', pool_key, ARGV[i]) == 1 then",
        "if #found == 1 then",
    ),
    _of(
        "drop-with-any-token",
        "drop",
        "if lease[3] ~= token or tonumber(lease[2] or '0') < now then",
        "if false then",
        "stops",
        batchers=2,
    ),
    _of(
        "retire-untrained",
        "retire",
        "math.min(tonumber(last_step), tonumber(meta[1] or '0'), trained)",
        "tonumber(meta[1] or '0')",
    ),
    _of("report-goes-back", "report", "if trained > before then", "if true then", "deaths"),
    _of("report-moves-twice", "report", "for step = before + 1, trained do", "for step = 1, trained do"),
    _of("report-of-any-attempt", "report", "if trainer[1] ~= attempt then", "if false then", "stops"),
    _of(
        "announce-goes-back",
        "announce",
        "if current_epoch == epoch and tonumber(version) >= tonumber(new_version) and not gains_weights then",
        "if false then",
        "deaths",
        checkpoint_every=3,
    ),
    _of("lease-without-owner", "lease", "if expires_at >= now and owner ~= who then", "if false then", batchers=2),
    _of(
        "token-stays",
        "lease",
        "token = string.format('%.0f', math.max(now, tonumber(token) + 1))",
        "token = token == '0' and '1' or token",
        "deaths",
    ),
    _of(
        "ticket-without-allowance",
        "ticket",
        "free = math.min(wanted, free)",
        "free = wanted",
        tickets=True,
        writers=3,
    ),
    _of(
        "ticket-keeps-its-version",
        "ticket",
        "redis.call('HSET', taken_key, ",
        "redis.call('HSETNX', taken_key, ",
        "stops",
        tickets=True,
    ),
    _of(
        "ticket-given-twice",
        "ticket",
        "redis.call('ZRANGEBYSCORE', tickets_key, '-inf', clock, ",
        "redis.call('ZRANGEBYSCORE', tickets_key, '-inf', '+inf', ",
        tickets=True,
        writers=3,
    ),
    _of(
        "reuse-swept-early",
        "commit",
        "  if reuse_records[i] then\n",
        "  redis.call('ZADD', garbage_key, 0, payloads[i])\n  if reuse_records[i] then\n",
        "stops",
    ),
    _of("reuse-in-the-ledger", "commit", "  if is_again[i] then\n    redis", "  if false then\n    redis"),
    _of(
        "drop-keeps-the-reuse",
        "drop",
        "redis.call('HDEL', reuse_key, group .. ' ' .. ARGV[i], group)",
        "",
        "stops",
    ),
    # A plan may name a group that was released meanwhile. That its record is there, and that it says the uses which
    # the plan assumed, are one check in two places: a step of this leader alone can change either.
    _of(
        "uses-not-checked",
        "commit",
        "local record = used_group ~= '' and redis.call('HGET', reuse_key, used_group .. ' ' .. id)",
        "local record = used_group ~= '' and (redis.call('HGET', reuse_key, used_group .. ' ' .. id) or 'a gone 0 0 ')",
        also=((", recorded_uses ~= uses\n", ", false\n"),),
        reuse=True,
        releaser=True,
    ),
    # An answer that comes after another scorer's, or after the group was dropped, must find nothing to replace.
    _of(
        "scored-though-gone",
        "push",
        "  old = {}\n",
        "  if #found == 0 then\n"
        "    found = {{0, {'env', env, 'group', group, 'rollouts', rollouts, 'tokens', tokens}}}\n"
        "  end\n  old = {}\n",
        scorers=2,
    ),
    _of("scored-beside-the-old", "push", "redis.call('XDEL', pool_key, replaced)", "local _ = 0", scorers=1),
    _of(
        "scored-counts-as-pushed",
        "push",
        "else\n  redis.pcall('HINCRBY', ledger_key, env .. ':pushed:rollouts'",
        "end\ndo\n  redis.pcall('HINCRBY', ledger_key, env .. ':pushed:rollouts'",
        scorers=1,
    ),
    _of("scored-grows-younger", "push", "old.pushed or string.match(replaced, '^%d+')", "number", scorers=1),
    _opened("key-begins-twice", "begin", "if begun then return {'DUP', begun} end", ""),
    _opened(
        "begin-without-ticket",
        "begin",
        "not redis.call('ZSCORE', tickets_key, number) or redis.call('EXISTS', group_key) == 1",
        "redis.call('EXISTS', group_key) == 1",
        "stops",
    ),
    _opened("ticket-begins-twice", "begin", " or redis.call('EXISTS', group_key) == 1", "", "stops"),
    _opened("call-recorded-twice", "call", "if newest and newest ~= seen_call then", "if false then"),
    _opened("call-recorded-again", "call", "if number then", "if false then", "network"),
    _opened(
        "call-behind-what-is-lost",
        "call",
        "if after ~= '0' and not is_there(after, after_id) then",
        "if false then",
        "server",
        rollback=True,
        sample_seconds=0.5,
    ),
    _opened("call-of-any-sequence", "call", "if sequences > tonumber(most_sequences)", "if false"),
    _opened("call-after-the-end", "call", "if rollout[1] ~= 'open' then", "if false then"),
    _opened("call-in-what-is-frozen", "call", "if rollout[10] then", "if false then"),
    _opened("call-of-anybody", "call", "if not rollout[1] or rollout[2] ~= capability then", "if not rollout[1] then"),
    _opened(
        "call-of-another-line",
        "call",
        "if line ~= sampled_line or tonumber(rollout[4]) < tonumber(line) then",
        "if false then",
        taken_back=0.6,
    ),
    _opened(
        "call-keeps-its-age",
        "call",
        "math.min(tonumber(rollout[8]), tonumber(oldest))",
        "tonumber(oldest)",
    ),
    _opened("call-leaves-the-ticket", "call", "redis.call('ZADD', tickets_key, 'XX', ", "tostring("),
    _opened("call-refused-for-memory", "call", "#!lua flags=allow-oom", "#!lua", full=True),
    _opened("drop-of-what-is-pushed", "end", "if rollout[1] ~= 'ended' then return", "if false then return", full=True),
    _opened("end-takes-another", "end", "if rollout[1] ~= 'open' then", "if false then"),
    _opened("end-before-the-others", "end", "<= 0 then", "<= 1 then"),
    _opened("end-before-its-deadline", "end", "if till > now then return {'OPEN'} end", "", "stops"),
    _opened("push-of-what-is-open", "push", "if opened ~= '0' and not redis", "if false and not redis"),
    _opened("push-stays-waiting", "push", "redis.call('ZREM', ended_key, group)", ""),
    _opened(
        "open-pushed-twice",
        "push",
        "redis.call('HSET', producer_key, 'sequence', number, 'id', id)",
        "if opened == '0' then redis.call('HSET', producer_key, 'sequence', number, 'id', id) end",
        "network",
    ),
    _opened(
        "forget-too-early",
        "forget",
        "if now - pushed > tonumber(kept) then",
        "if pushed < now then",
    ),
    _opened(
        "forget-with-any-token",
        "forget",
        "if lease[3] ~= token or tonumber(lease[2] or '0') < now then",
        "if false then",
        "stops",
        batchers=2,
    ),
    _of("commit-refused-for-memory", "commit", "#!lua flags=allow-oom", "#!lua", full=True),
    _of("void-in-the-same-epoch", "void", "tonumber(meta[1]) + 1", "tonumber(meta[1])", taken_back=0.7),
    _of("void-leaves-the-leader", "void", "redis.call('HSET', lease_key, 'until', '0')", "", taken_back=0.7),
    _of(
        "void-leaves-the-policy",
        "void",
        "if is_void and announces ~= '1' then redis.call('HDEL', policy_key, policies[i]) end",
        "",
        taken_back=0.7,
    ),
    _of(
        "void-of-packed-alone",
        "void",
        "local fate = tonumber(step) <= trained and 'trained' or 'packed'",
        "local fate = 'packed'",
        taken_back=0.7,
    ),
    _of(
        "void-leaves-the-reuse",
        "void",
        "if last_use and tonumber(last_use) > keep then",
        "if false then",
        taken_back=0.7,
        reuse=True,
    ),
    _of("void-loses-a-part", "void", "if tonumber(step) <= keep then", "if tonumber(step) < keep then", taken_back=0.7),
    _of(
        "recover-in-the-same-epoch",
        "recover",
        "math.max(tonumber(meta[1]), tonumber(claimed_epoch)) + 1)",
        "tonumber(meta[1]))",
        rollback=True,
    ),
    _of(
        "attempt-in-the-same-line",
        "attempt",
        "if refusal or is_above or (trainer[3] and trainer[3] ~= server) then",
        "if false then",
        rollback=True,
    ),
    _of(
        "recover-without-tombstone", "recover", "redis.call('ZADD', closed_key, closed_at, ARGV[i])", "", rollback=True
    ),
    _of("recover-leaves-the-pool", "recover", "redis.call('XDEL', pool_key, use.id)", "", rollback=True),
    _of(
        "recover-any-claim",
        "recover",
        "if trainer[1] ~= attempt or trainer[2] ~= claim then",
        "if false then",
        rollback=True,
    ),
)
"""All of them."""


def mutation(name: str) -> Mutation:
    """The mutation of that name. Raises KeyError."""
    return {m.name: m for m in MUTATIONS}[name]
