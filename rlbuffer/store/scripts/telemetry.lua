#!lua flags=allow-oom
-- TELEMETRY: heartbeats, waiting sentences and counters. It changes no step and no account. It is a script for two
-- reasons: times come from the server's clock, and the sentence that says that the memory is full must not be refused
-- for memory.
--
-- KEYS  1 the hash: workers, scorers, ranks, batchers or waiting for `note`, the ledger for `count` and `damaged`
--       2 (damaged) the damaged rollouts that are counted: `<step> <group> <rollout>` -> step   3 (damaged) meta
-- ARGV  1 action, then
--       note   2 name   3 record ('' removes it)   4 age at which others are forgotten, ms
--              stored as "<server ms> <record>"; the old ones are pruned when a new name appears
--       count  2 field   3 how many more
--       damaged  2 step   3... `<group> <rollout>` of it; each is counted once, and forgotten when its step is retired
-- Reply {'OK'}
if ARGV[1] == 'count' then
  redis.pcall('HINCRBY', KEYS[1], ARGV[2], ARGV[3])
  return {'OK'}
end
if ARGV[1] == 'damaged' then
  -- A retired step is pulled no more: what is noted of it has done its work.
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', redis.call('HGET', KEYS[3], 'retired') or '0')
  local fresh = 0
  for i = 3, #ARGV do fresh = fresh + redis.call('ZADD', KEYS[2], 'NX', ARGV[2], ARGV[2] .. ' ' .. ARGV[i]) end
  if fresh > 0 then redis.pcall('HINCRBY', KEYS[1], 'damaged', fresh) end
  return {'OK'}
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[2])
  return {'OK'}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    local at = tonumber(string.match(all[i + 1], '^(%d+) ') or '0')
    if at < now - tonumber(ARGV[4]) then redis.call('HDEL', KEYS[1], all[i]) end
  end
end
redis.call('HSET', KEYS[1], ARGV[2], string.format('%.0f', now) .. ' ' .. ARGV[3])
return {'OK'}
