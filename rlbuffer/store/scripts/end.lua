#!lua flags=allow-oom
-- END: an open rollout is over, with a reward or as a failure. The same end again changes nothing, another one is refused.
-- With the last one of its group the group waits for its push. Where the server is full and nothing else can make room,
-- an ended one may lose its calls: then it is pushed as a failure.
--
-- KEYS  1 meta   2 open   3 open_rollout   4 open_group   5 open_ended   6 open_counts   7 tickets of the env
-- ARGV  1 action   2 name of the rollout   3 end   4 group id   5 env   6 number of the ticket
--       7 how long the ticket stays out behind the deadline, ms, then
--       end    8 digest of its capability; '' for a gateway that ends it by itself
--       expire 8 longest idle limit that there is, ms: a deadline that is farther off was given by a clock that has been
--                set back since, and is given anew
--       drop   8 why its calls go
-- Reply {'OK'}
--       {'SAME'}          it has this end already
--       {'OTHER', end}    it has another end, this
--       {'OPEN'}          (expire) its deadline has not passed; (drop) it has not ended, or is pushed
--       {'UNKNOWN'}       there is no such rollout, or it has another capability
--       {'GONE'}          the run does not exist
local meta_key, open_key, rollout_key, group_key, ended_key, counts_key, tickets_key = unpack(KEYS, 1, 7)
local action, name, ending, group, env, ticket, grace, word = unpack(ARGV, 1, 8)
if redis.call('HEXISTS', meta_key, 'schema') == 0 then return {'GONE'} end
local rollout = redis.call('HMGET', rollout_key, 'state', 'capability', 'end', 'idle')
if not rollout[1] or (action == 'end' and word ~= '' and rollout[2] ~= word) then return {'UNKNOWN'} end
if action == 'drop' then
  if rollout[1] ~= 'ended' then return {'OPEN'} end
  local names, kept = {'state', 'capability', 'epoch', 'idle', 'begun', 'heard', 'calls', 'sequences', 'bytes', 'tokens',
    'oldest', 'end'}, {'dropped', word}
  local values = redis.call('HMGET', rollout_key, unpack(names))
  for k = 1, #names do
    if values[k] then
      kept[#kept + 1] = names[k]
      kept[#kept + 1] = values[k]
    end
  end
  redis.call('UNLINK', rollout_key)
  redis.call('HSET', rollout_key, unpack(kept))
  return {'OK'}
end
if rollout[1] ~= 'open' then
  if rollout[3] == ending then return {'SAME'} end
  return {'OTHER', rollout[3] or ''}
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local deadline = now + tonumber(rollout[4])
if action == 'expire' then
  local till = tonumber(redis.call('ZSCORE', open_key, name) or '0')
  if till > now + tonumber(word) then redis.call('ZADD', open_key, string.format('%.0f', deadline), name) end
  if till > now then return {'OPEN'} end
end

redis.call('HSET', rollout_key, 'state', 'ended', 'end', ending)
redis.call('ZREM', open_key, name)
redis.call('ZADD', tickets_key, 'XX', string.format('%.0f', deadline + tonumber(grace)), ticket)
redis.pcall('HINCRBY', counts_key, env .. ':ended', 1)
if redis.call('HINCRBY', group_key, 'left', -1) <= 0 then
  redis.call('ZADD', ended_key, string.format('%.0f', now), group)
end
return {'OK'}
