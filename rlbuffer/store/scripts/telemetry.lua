#!lua flags=allow-oom
-- TELEMETRY: heartbeats and counters. It changes no step and no account. It is a script for two reasons: times come
-- from the server's clock, and the heartbeat that says that the memory is full must not be refused for memory.
--
-- KEYS  1 the hash: workers, scorers, ranks or batchers for `note`, the ledger for `count` and `damaged`,
--         or the stream of the trainer's records
--       2 (damaged) the damaged rollouts that are counted: `<step> <group> <rollout>` -> step   3 (damaged) meta
-- ARGV  1 action, then
--       note   2 name   3 record   4 age at which others are forgotten, ms
--              stored as "<server ms> <record>". A new name looks at eight others, whichever, and takes the old ones out:
--              so they stay few, and no name costs more when there are many
--       count  2 field   3 how many more
--       record  2 record   3 how many are kept, about
--       damaged  2 step   3... `<group> <rollout>` of it; each is counted once, and forgotten when its step is retired
-- Reply {'OK'}; of `note` {'OK', what stood under the name before, or ''}
local hash_key, damaged_key, meta_key = unpack(KEYS, 1, 3)
local action = ARGV[1]
if action == 'count' then
  local field, more = ARGV[2], ARGV[3]
  redis.pcall('HINCRBY', hash_key, field, more)
  return {'OK'}
end
if action == 'record' then
  local record, most = ARGV[2], ARGV[3]
  redis.call('XADD', hash_key, 'MAXLEN', '~', most, '*', 'record', record)
  return {'OK'}
end
if action == 'damaged' then
  local step = ARGV[2]
  -- A retired step is pulled no more: what is noted of it has done its work.
  redis.call('ZREMRANGEBYSCORE', damaged_key, '-inf', redis.call('HGET', meta_key, 'retired') or '0')
  local fresh = 0
  for i = 3, #ARGV do fresh = fresh + redis.call('ZADD', damaged_key, 'NX', step, step .. ' ' .. ARGV[i]) end
  if fresh > 0 then redis.pcall('HINCRBY', hash_key, 'damaged', fresh) end
  return {'OK'}
end
local name, record, forgotten_after = ARGV[2], ARGV[3], ARGV[4]
local before = redis.call('HGET', hash_key, name) or ''
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if redis.call('HSET', hash_key, name, string.format('%.0f', now) .. ' ' .. record) == 1 then
  for _, other in ipairs(redis.call('HRANDFIELD', hash_key, 8)) do
    local at = tonumber(string.match(redis.call('HGET', hash_key, other), '^(%d+) ') or '0')
    -- What was said later than now was said by a clock that has been set back since.
    if math.abs(now - at) > tonumber(forgotten_after) then redis.call('HDEL', hash_key, other) end
  end
end
return {'OK', before}
