#!lua flags=allow-oom
-- RETIRE: steps that no checkpoint needs any more leave the stream; never one that was not trained. Their payloads are
-- swept afterwards by the caller, because they live in other slots.
--
-- KEYS  1 lease   2 meta   3 steps   4 trainer
-- ARGV  1 token   2 last step that may go
-- Reply {'OK', last retired step} | {'FENCED', owner}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease = redis.call('HMGET', KEYS[1], 'owner', 'until', 'token')
if lease[3] ~= ARGV[1] or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end

local meta = redis.call('HMGET', KEYS[2], 'step', 'retired')
local trained = tonumber(redis.call('HGET', KEYS[4], 'trained') or '0')
local retired = tonumber(meta[2] or '0')
local up_to = math.min(tonumber(ARGV[2]), tonumber(meta[1] or '0'), trained)
if up_to > retired then
  redis.call('XTRIM', KEYS[3], 'MINID', string.format('%.0f-0', up_to + 1))
  retired = up_to
  redis.call('HSET', KEYS[2], 'retired', string.format('%.0f', retired))
end
return {'OK', string.format('%.0f', retired)}
