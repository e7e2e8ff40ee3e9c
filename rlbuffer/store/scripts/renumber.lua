#!lua flags=allow-oom
-- RENUMBER: the ids of the pool, or of the results of evaluations, come back to the clock. An entry that was added by
-- hand with an id far ahead makes every later push one of that time, and with the largest id there can be no later one.
-- The clock may also have been set back.
-- Entries whose ids lie ahead get new ones, in their order; so the leader must read everything again.
--
-- KEYS  1 lease   2 pool, or eval
-- ARGV  1 token   2 how far ahead of the clock an id may lie, ms
-- Reply {'OK'}              no id that the pool has given lies ahead
--       {'MOVED', entries}  it was made anew; so many entries have other ids
--       {'FENCED', owner}
local lease_key, stream_key = unpack(KEYS)
local token, most_ahead = unpack(ARGV, 1, 2)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease = redis.call('HMGET', lease_key, 'owner', 'until', 'token')
if lease[3] ~= token or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end

if redis.call('EXISTS', stream_key) == 0 then return {'OK'} end
local facts, newest = redis.call('XINFO', 'STREAM', stream_key), '0-0'
for k = 1, #facts, 2 do
  if facts[k] == 'last-generated-id' then newest = facts[k + 1] end
end
local function is_ahead(id) return tonumber(string.match(id, '^%d+')) > now + tonumber(most_ahead) end
if not is_ahead(newest) then return {'OK'} end

local entries, ahead = redis.call('XRANGE', stream_key, '-', '+'), 0
-- A stream never goes back, so it is made anew.
redis.call('DEL', stream_key)
for i = 1, #entries do
  local id = entries[i][1]
  if is_ahead(id) then id, ahead = '*', ahead + 1 end
  redis.call('XADD', stream_key, id, unpack(entries[i][2]))
end
return {'MOVED', ahead}
