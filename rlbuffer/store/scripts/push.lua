#!lua flags=allow-cross-slot-keys
-- PUSH, phase 2: the group whose payload was stored by phase 1 becomes pending. Exactly once per producer sequence.
-- Phase 1 (a plain transaction, `ProducerStore` in store/producer.py) stored it under a name of its own, where it expires.
-- Here it gets the name that steps refer to, for good, in the same move that makes it pending: so nothing pending can
-- expire, and a phase 1 that is delivered late touches nothing in use. Payload keys are not declared, because they lie in
-- other slots of a (one-shard) cluster. In a cluster of several shards this script touches none: phase 1 has given the
-- payload its name where nothing stands under it, and the writer, or the leader, makes it permanent after this.
-- A push may take the place of a pending one: the same rollouts, with what that one needed. The ledger does not move
-- then, and the payload that is replaced becomes garbage. When that one is no longer pending (another scorer was first,
-- or it was dropped), nothing becomes pending, and the new payload goes.
-- A group of open rollouts is its own producer: its only push is sequence 1. In the same move its rollouts count as pushed,
-- and their calls go. So whichever gateway pushes it, and however often, it is pushed once.
-- Refused at the memory limit (no allow-oom): a worker can wait.
--
-- KEYS  1 meta  2 pool  3 producer, or open_group  4 ledger  5 garbage
--       of open rollouts: 6 open_ended  7 open_pushed  8 open_counts  9... open_rollout of each
-- ARGV  1 epoch that the producer works in   2 its sequence, from 1   3 key under which phase 1 stored the payload, ''
--         where the payload lies on another shard
--       4 env   5 group id   6 payload suffix   7 rollouts   8 tokens   9 metadata
--       10 id of the entry whose place it takes, '' for none   11 payload key prefix
--       12 how many open rollouts it is of, '0' for a worker's or scorer's
-- Reply {'OK', entry id, step}   the run's last committed step
--       {'DUP', entry id, pending}  sequence known already; the id is '' unless it was the producer's last, and then
--                           `pending` is '1' while that entry is in the pool, else ''
--       {'LATE'}            what it was to replace is not pending any more; where the server lost writes, another group
--                           may have its id
--       {'MISSING'}         its payload has expired, or the server lost it: phase 1 comes again
--       {'UNEQUAL', rollouts, tokens}  what it was to replace holds another number of them: this
--       {'JAMMED', why}     the pool takes no entry: somebody added one with the largest id, or it is no stream
--       {'GAP', last}       pushes between `last` and this one are missing here
--       {'OPEN'}            its open rollouts are not there, or one of them has not ended
--       {'GONE', epoch, line}  the run is in another epoch ('' when it does not exist); its line of versions began in
--                           the epoch `line`
-- A replacing entry has two fields more: `replaces`, that id, and `pushed`, when its rollouts came first (server ms).
local meta_key, pool_key, producer_key, ledger_key, garbage_key = unpack(KEYS)
local producer_epoch, number, stored, env, group, suffix, rollouts, tokens, metadata, replaced, prefix, opened
  = unpack(ARGV, 1, 12)
local epoch = redis.call('HGET', meta_key, 'epoch')
if epoch ~= producer_epoch then
  local first = redis.call('HMGET', meta_key, 'line', 'since')
  return {'GONE', epoch or '', first[1] or first[2] or epoch or ''}
end

local producer = redis.call('HMGET', producer_key, 'sequence', 'id')
local last = tonumber(producer[1] or '0') or 0  -- a worker may have written anything there
local sequence = tonumber(number)
if sequence <= last then
  if stored ~= '' then redis.call('UNLINK', stored) end
  local id = sequence == last and producer[2] or ''
  local is_pending = id ~= '' and #redis.call('XRANGE', pool_key, id, id) > 0
  return {'DUP', id, is_pending and '1' or ''}
end
if sequence > last + 1 then return {'GAP', string.format('%.0f', last)} end
local ended_key, pushed_key, counts_key = unpack(KEYS, 6, 8)
if opened ~= '0' and not redis.call('ZSCORE', ended_key, group) then return {'OPEN'} end

if stored ~= '' and redis.call('EXISTS', stored) == 0 then return {'MISSING'} end

local old = nil
if replaced ~= '' then
  local found = redis.call('XRANGE', pool_key, replaced, replaced)
  old = {}
  for k = 1, #found > 0 and #found[1][2] or 0, 2 do old[found[1][2][k]] = found[1][2][k + 1] end
  if old.env ~= env or old.group ~= group then
    -- The producer's next push follows it, though nothing becomes pending.
    redis.call('HSET', producer_key, 'sequence', number, 'id', '')
    if stored ~= '' then redis.call('UNLINK', stored) end
    return {'LATE'}
  end
  if old.rollouts ~= rollouts or old.tokens ~= tokens then
    return {'UNEQUAL', old.rollouts or '', old.tokens or ''}
  end
end

local entry = {'env', env, 'group', group, 'key', suffix, 'rollouts', rollouts, 'tokens', tokens, 'metadata', metadata}
if old then
  for _, field in ipairs({'replaces', replaced, 'pushed', old.pushed or string.match(replaced, '^%d+')}) do
    entry[#entry + 1] = field
  end
end
-- The account does not decide: what a worker has made unreadable there stops no push and no step, `verify` names it.
local id = redis.pcall('XADD', pool_key, '*', unpack(entry))
if type(id) == 'table' then return {'JAMMED', id.err} end
if stored ~= '' then
  local payload = prefix .. group .. ':' .. suffix
  redis.call('RENAME', stored, payload)
  redis.call('PERSIST', payload)
end
if old then redis.call('XDEL', pool_key, replaced) end
redis.call('HSET', producer_key, 'sequence', number, 'id', id)
if old then
  redis.call('ZADD', garbage_key, 0, prefix .. group .. ':' .. old.key)  -- 0: the next sweep may take it
else
  redis.pcall('HINCRBY', ledger_key, env .. ':pushed:rollouts', rollouts)
  redis.pcall('HINCRBY', ledger_key, env .. ':pushed:tokens', tokens)
end
if opened ~= '0' then
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  redis.call('ZREM', ended_key, group)
  redis.call('ZADD', pushed_key, string.format('%.0f', now), group)
  redis.call('HDEL', producer_key, 'about')
  redis.pcall('HINCRBY', counts_key, env .. ':pushed', opened)
  local names = {'capability', 'epoch', 'begun', 'heard', 'calls', 'sequences', 'bytes', 'tokens', 'oldest', 'end'}
  for i = 9, 8 + tonumber(opened) do
    local values, kept = redis.call('HMGET', KEYS[i], unpack(names)), {'state', 'pushed'}
    for k = 1, #names do
      if values[k] then
        kept[#kept + 1] = names[k]
        kept[#kept + 1] = values[k]
      end
    end
    redis.call('UNLINK', KEYS[i])
    redis.call('HSET', KEYS[i], unpack(kept))
  end
end
return {'OK', id, redis.call('HGET', meta_key, 'step') or '0'}
