#!lua
-- BEGIN: a ticket becomes a group of open rollouts. Exactly once per key of the caller: the key asked again is answered
-- with the group that it has begun.
-- Refused at the memory limit (no allow-oom): nothing new is sampled then.
--
-- KEYS  1 meta   2 open   3 open_keys   4 open_group of the group   5 open_counts   6 tickets of the env
--       7... open_rollout of each rollout
-- ARGV  1 digest of the caller's key   2 group id   3 env   4 number of the ticket   5 idle limit, ms
--       6 how long the ticket stays out behind the deadline of its rollouts, ms   7 salt of the capabilities
--       8 about: what the gateway needs to know of the group   9... digest of each rollout's capability
-- Reply {'OK', group}
--       {'DUP', group}   the key has begun this group before
--       {'TAKEN'}        the ticket is not out any more, or its group was begun with another key
--       {'GONE'}         the run does not exist
local meta_key, open_key, keys_key, group_key, counts_key, tickets_key = unpack(KEYS, 1, 6)
local key_digest, group, env, number, idle, grace, salt, about = unpack(ARGV, 1, 8)
local epoch = redis.call('HGET', meta_key, 'epoch')
if not epoch then return {'GONE'} end
local begun = redis.call('HGET', keys_key, key_digest)
if begun then return {'DUP', begun} end
if not redis.call('ZSCORE', tickets_key, number) or redis.call('EXISTS', group_key) == 1 then return {'TAKEN'} end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local clock, size = string.format('%.0f', now), #ARGV - 8
local deadline = string.format('%.0f', now + tonumber(idle))
redis.call('ZADD', tickets_key, string.format('%.0f', now + tonumber(idle) + tonumber(grace)), number)
redis.call('HSET', keys_key, key_digest, group)
redis.call('HSET', group_key, 'key', key_digest, 'env', env, 'number', number, 'size', size, 'left', size,
  'epoch', epoch, 'salt', salt, 'about', about, 'begun', clock)
for i = 1, size do
  redis.call('HSET', KEYS[6 + i], 'state', 'open', 'capability', ARGV[8 + i], 'epoch', epoch, 'idle', idle,
    'begun', clock, 'heard', clock, 'calls', 0, 'sequences', 0, 'bytes', 0, 'tokens', 0)
  redis.call('ZADD', open_key, deadline, group .. '/' .. (i - 1))
end
redis.pcall('HINCRBY', counts_key, env .. ':begun', size)
return {'OK', group}
