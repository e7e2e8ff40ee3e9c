#!lua flags=allow-oom
-- FORGET: groups of open rollouts that were pushed long ago leave nothing behind. Until then their ends and their keys are
-- known, so that what is asked again is answered as before.
--
-- KEYS  1 lease   2 open_pushed   3 open_keys, then of each group: open_group, open_rollout of each of its rollouts
-- ARGV  1 token   2 how long a group is known, ms, then of each group: group id, how many rollouts it has
-- Reply {'OK', groups forgotten} | {'FENCED', owner}
local lease_key, pushed_key, keys_key = unpack(KEYS, 1, 3)
local token, kept = unpack(ARGV, 1, 2)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease = redis.call('HMGET', lease_key, 'owner', 'until', 'token')
if lease[3] ~= token or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end

local at, forgotten = 4, 0
for i = 3, #ARGV, 2 do
  local group, size = ARGV[i], tonumber(ARGV[i + 1])
  local pushed = tonumber(redis.call('ZSCORE', pushed_key, group) or 'inf')
  if now - pushed > tonumber(kept) then
    redis.call('HDEL', keys_key, redis.call('HGET', KEYS[at], 'key') or '')
    redis.call('UNLINK', unpack(KEYS, at, at + size))
    redis.call('ZREM', pushed_key, group)
    forgotten = forgotten + 1
  end
  at = at + 1 + size
end
return {'OK', forgotten}
