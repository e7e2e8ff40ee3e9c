#!lua flags=allow-cross-slot-keys
-- PUSH, phase 2: the group whose payload was stored by phase 1 becomes pending. Exactly once per producer sequence.
-- Phase 1 (a plain transaction, `PushMoves` in moves/push.py) stored it under a name of its own, where it lapses.
-- Here it gets the name that steps refer to, for good, in the same move that makes it pending: so nothing pending can
-- lapse, and a phase 1 that is delivered late touches nothing in use. Payload keys are not declared, because they lie in
-- other slots of a (one-shard) cluster. In a cluster of several shards this script touches none: phase 1 has given the
-- payload its name where nothing stands under it, and the writer, or the leader, makes it permanent after this.
-- A push may take the place of a pending one: the same rollouts, with what that one needed. The ledger does not move
-- then, and the payload that is replaced becomes garbage. When that one is no longer pending (another scorer was first,
-- or it was dropped), nothing becomes pending, and the new payload goes.
-- Refused at the memory limit (no allow-oom): a worker can wait.
--
-- KEYS  1 meta  2 pool  3 producer  4 ledger  5 garbage  6 room: what the leader leaves to pushes, in bytes, as
--       'env NAME', 'env *' (envs without a field of their own, together), 'worker UUID', 'worker *' (each of the others)
--       7 taken: what pushes have taken of it since
-- ARGV  1 epoch that the producer works in   2 its sequence, from 1   3 key under which phase 1 stored the payload, ''
--         where the payload lies on another shard
--       4 env   5 group id   6 payload suffix   7 rollouts, 0 when its writer gives it up   8 tokens   9 metadata
--       10 id of the entry whose place it takes, '' for none   11 payload key prefix
--       12 its rollouts by length: bucket, rollouts, tokens of each; a space between two of them
--       13 bytes of its payload, as its writer has it: counts where this cannot see it
-- Reply {'OK', entry id}
--       {'DUP', entry id}   sequence known already; the id is '' unless it was the producer's last
--       {'LATE'}            what it was to replace is not pending any more; where the server lost writes, another group
--                           may have its id
--       {'LOST'}            it was given up: counted as lost, and its sequence is used up
--       {'MISSING'}         its payload has lapsed, or the server lost it: phase 1 comes again
--       {'UNEQUAL', env, group, rollouts, tokens}  what it was to replace holds something else: this
--       {'FULL', field of room, bytes of the push}  its env or worker has used up its room; counted as refused
--       {'JAMMED', why}     the pool takes no entry: somebody added one with the largest id, or it is no stream
--       {'GAP', last}       pushes between `last` and this one are missing here
--       {'GONE', epoch, line}  the run is in another epoch ('' when it does not exist); its line of versions began in
--                           the epoch `line`
-- A replacing entry has two fields more: `replaces`, that id, and `pushed`, when its rollouts came first (server ms).
local meta_key, pool_key, producer_key, ledger_key, garbage_key, room_key, taken_key = unpack(KEYS)
local its_epoch, number, stored, env, group, suffix, rollouts, tokens, metadata, replaced, prefix,
  lengths, bytes = unpack(ARGV, 1, 13)
local epoch = redis.call('HGET', meta_key, 'epoch')
if epoch ~= its_epoch then 
  local first = redis.call('HMGET', meta_key, 'line', 'since')
  return {'GONE', epoch or '', first[1] or first[2] or epoch or ''}
end

local known = redis.call('HMGET', producer_key, 'sequence', 'id')
local last = tonumber(known[1] or '0') or 0  -- a worker may have written anything there
local sequence = tonumber(number)
if sequence <= last then
  if stored ~= '' then redis.call('UNLINK', stored) end
  return {'DUP', sequence == last and known[2] or ''}
end
if sequence > last + 1 then return {'GAP', string.format('%.0f', last)} end

-- The producer's next push follows it, though nothing becomes pending.
local function use_up()
  redis.call('HSET', producer_key, 'sequence', number, 'id', '')
  if stored ~= '' then redis.call('UNLINK', stored) end
end
if rollouts == '0' then
  use_up()
  redis.pcall('HINCRBY', ledger_key, 'lost', 1)
  return {'LOST'}
end
if stored ~= '' and redis.call('EXISTS', stored) == 0 then return {'MISSING'} end

local old = nil
if replaced ~= '' then
  local found = redis.call('XRANGE', pool_key, replaced, replaced)
  old = {}
  for k = 1, #found > 0 and #found[1][2] or 0, 2 do old[found[1][2][k]] = found[1][2][k + 1] end
  if old.env ~= env or old.group ~= group then
    use_up()
    return {'LATE'}
  end
  if old.rollouts ~= rollouts or old.tokens ~= tokens then
    return {'UNEQUAL', old.env or '', old.group or '', old.rollouts or '', old.tokens or ''}
  end
end

-- Fields under which it takes room, and its bytes. Workers may write `taken`, and it counts only where there is a room.
local takes, size = {}, #metadata
if not old then
  local worker = 'worker ' .. (string.match(suffix, '^[^.]*') or '')
  local rooms = redis.call('HMGET', room_key, 'env ' .. env, 'env *', worker, 'worker *')
  local left = {}
  for i = 1, 4 do left[i] = tonumber(rooms[i] or '') end
  if left[1] or left[2] then takes[1] = {left[1] and 'env ' .. env or 'env *', left[1] or left[2]} end
  if left[3] or left[4] then takes[#takes + 1] = {worker, left[3] or left[4]} end
  if #takes > 0 and stored == '' then
    size = size + (tonumber(bytes) or 0)
  elseif #takes > 0 then
    for i = 0, math.min(tonumber(rollouts) or 0, redis.call('HLEN', stored)) - 1 do
      size = size + redis.call('HSTRLEN', stored, i)
    end
    size = size + redis.call('HSTRLEN', stored, 'group')
  end
  for _, take in ipairs(takes) do
    if take[2] <= (tonumber(redis.call('HGET', taken_key, take[1]) or '0') or 0) then
      redis.pcall('HINCRBY', ledger_key, 'refused', 1)
      return {'FULL', take[1], string.format('%.0f', size)}
    end
  end
end

local entry = {'env', env, 'group', group, 'key', suffix, 'rollouts', rollouts, 'tokens', tokens, 'metadata', metadata,
  'lengths', lengths}
if old then
  for _, field in ipairs({'replaces', replaced, 'pushed', old.pushed or string.match(replaced, '^%d+')}) do
    entry[#entry + 1] = field
  end
end
-- The account does not decide: what a worker has made unreadable there stops no push and no step, `verify` names it.
local id = redis.pcall('XADD', pool_key, '*', unpack(entry))
if type(id) == 'table' then return {'JAMMED', id.err} end
for _, take in ipairs(takes) do redis.pcall('HINCRBY', taken_key, take[1], size) end
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
return {'OK', id}
