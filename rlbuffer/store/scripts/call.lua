#!lua flags=allow-oom
-- CALL: one call of a policy is part of its open rollout, before its agent hears the answer. Exactly once: a call that is
-- there already, by its id, is not recorded again, whatever was recorded since. It is recorded while the newest call of its
-- request is the one that its gateway had seen; else what stands there is answered.
-- A server that lost its newest writes gives their numbers to other calls. So a call is named by its number and its id.
-- Each call moves the deadline of its rollout, and that of its ticket with it.
--
-- KEYS  1 meta   2 open   3 open_rollout   4 tickets of the env   5 open_counts
-- ARGV  1 action   2 name of the rollout   3 digest of its capability   4 env   5 number of the ticket
--       6 how long the ticket stays out behind the deadline, ms, then
--       record  7 line of versions that it was sampled in   8 request   9 newest call of that request, as its gateway
--               has seen it ('0': none)   10 call that it goes on from ('0': none)   11 history that ends with its answer
--               12 the call   13 oldest version of a token   14 tokens sampled   15 most calls   16 most bytes
--               17 its id   18 id of the call that it goes on from; '' where its number alone is known
--               19 most sequences
--               -> {'OK', number}            numbers begin with 1
--                  {'SAME', number}          it is there already
--                  {'FROZEN'}                the rollout is frozen
--                  {'DUP', number, call}     another is the newest one of this request: this
--                  {'FULL', calls, bytes, sequences}  the rollout has as much already
--                  {'MISSING', number}       the call that it goes on from is not there
--                  {'LINE', epoch, line}     the run is in another line of versions, or the rollout was begun in another
--       touch   7 request, and 8 number of the call that its agent has heard ('0': none)   9 id of that call; '' where
--               its number alone is known   10 earlier tries of the request that it was told to   -> {'OK'}
--       freeze  no call is recorded from now on, and the end is still to come   -> {'OK'}
-- Reply of all: {'UNKNOWN'}      there is no such rollout, or it has another capability
--               {'ENDED', end}   it has ended, so
--               {'GONE'}         the run does not exist
local meta_key, open_key, rollout_key, tickets_key, counts_key = unpack(KEYS, 1, 5)
local action, name, capability, env, ticket, grace = unpack(ARGV, 1, 6)
if redis.call('HEXISTS', meta_key, 'schema') == 0 then return {'GONE'} end
local rollout = redis.call('HMGET', rollout_key, 'state', 'capability', 'end', 'epoch', 'idle', 'calls', 'bytes',
  'oldest', 'sequences', 'frozen')
if not rollout[1] or rollout[2] ~= capability then return {'UNKNOWN'} end
if rollout[1] ~= 'open' then return {'ENDED', rollout[3] or ''} end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local deadline = now + tonumber(rollout[5])

local function is_there(number, id)
  if id ~= '' then return redis.call('HGET', rollout_key, 'i:' .. id) == number end
  return redis.call('HEXISTS', rollout_key, 'c:' .. number) == 1
end

local calls = ''
if action == 'record' then
  local sampled_line, request, seen_call, after, history, call, oldest, tokens, most_calls, most_bytes, id, after_id,
    most_sequences = unpack(ARGV, 7, 19)
  local number = redis.call('HGET', rollout_key, 'i:' .. id)
  if number then return {'SAME', number} end
  if rollout[10] then return {'FROZEN'} end
  local newest = redis.call('HGET', rollout_key, 'r:' .. request)
  if newest and newest ~= seen_call then return {'DUP', newest, redis.call('HGET', rollout_key, 'c:' .. newest) or ''} end
  local meta = redis.call('HMGET', meta_key, 'epoch', 'line', 'since')
  local line = meta[2] or meta[3] or meta[1] or ''
  if line ~= sampled_line or tonumber(rollout[4]) < tonumber(line) then return {'LINE', meta[1] or '', line} end
  local full = {'FULL', rollout[6], rollout[7], rollout[9] or '0'}
  if tonumber(rollout[6]) >= tonumber(most_calls) or tonumber(rollout[7]) + #call > tonumber(most_bytes) then return full end
  if after ~= '0' and not is_there(after, after_id) then return {'MISSING', after} end
  -- A call that goes on from one that nobody has gone on from yet makes that one's sequence longer.
  local is_longer = after ~= '0' and redis.call('HEXISTS', rollout_key, 'n:' .. after) == 0
  local sequences = tonumber(rollout[9] or '0') + (is_longer and 0 or 1)
  if sequences > tonumber(most_sequences) then return full end
  if rollout[8] then oldest = string.format('%.0f', math.min(tonumber(rollout[8]), tonumber(oldest))) end
  calls = string.format('%.0f', tonumber(rollout[6]) + 1)
  redis.call('HSET', rollout_key, 'calls', calls, 'c:' .. calls, call, 'i:' .. id, calls, 'r:' .. request, calls,
    'h:' .. history, calls, 'oldest', oldest, 'sequences', string.format('%.0f', sequences))
  if is_longer then redis.call('HSET', rollout_key, 'n:' .. after, calls) end
  redis.call('HINCRBY', rollout_key, 'bytes', #call)
  redis.call('HINCRBY', rollout_key, 'tokens', tokens)
  redis.pcall('HINCRBY', counts_key, env .. ':calls', 1)
  redis.pcall('HINCRBY', counts_key, env .. ':tokens', tokens)
elseif action == 'freeze' then
  redis.call('HSET', rollout_key, 'frozen', '1')
elseif ARGV[8] ~= '0' and is_there(ARGV[8], ARGV[9]) then
  redis.call('HSET', rollout_key, 'a:' .. ARGV[7], ARGV[8] .. ' ' .. string.format('%.0f', now) .. ' ' .. ARGV[10])
end
redis.call('HSET', rollout_key, 'heard', string.format('%.0f', now))
redis.call('ZADD', open_key, string.format('%.0f', deadline), name)
redis.call('ZADD', tickets_key, 'XX', string.format('%.0f', deadline + tonumber(grace)), ticket)
return {'OK', calls}
