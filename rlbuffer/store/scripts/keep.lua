#!lua flags=allow-oom
-- KEEP: tickets that are out stay out, or are given back unused. It takes no memory, and passes at the memory limit: a
-- ticket that expired there would have its prompt sampled twice.
--
-- KEYS  1 tickets of the env (zset: number -> expiry, server ms)
-- ARGV  1 time to live, ms; 0 gives them back: they count as expired from now on   2... numbers
-- Reply {'OK'}; one that was closed meanwhile is never brought back
local tickets_key, ttl = KEYS[1], ARGV[1]
local expiry = '0'
if tonumber(ttl) > 0 then
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  expiry = string.format('%.0f', now + tonumber(ttl))
end
for i = 2, #ARGV do redis.call('ZADD', tickets_key, 'XX', expiry, ARGV[i]) end
return {'OK'}
