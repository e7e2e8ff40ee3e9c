#!lua flags=allow-oom
-- ASK: what an operator wants of the leader. It stands in `meta` until it is carried out, so whoever leads, now or
-- later, finds it; `asked` grows, so that who leads now looks.
--
-- KEYS  1 meta   2 allowance
-- ARGV  1 action, then
--       config  2 config   3 its digest   4 revision and   5 wanted digest ('' for none) as the operator saw them
--               -> {'OK'}      it is wanted now; or it was wanted already
--                  {'SAME'}    it is in force, and nothing else is wanted
--                  {'CHANGED', revision, wanted digest}   another operator, or the leader, came in between
--               A config that is in force takes the place of a wanted one: that is how one takes it back.
--       drain    2 epoch and   3 `asked` as the operator saw them
--                -> {'OK', since, server ms}   no ticket is given from now on; asked again, the first time counts
--       undrain  2 epoch and   3 `asked` as the operator saw them
--                -> {'OK'} | {'SAME'}          the leader's next allowance counts again
--                   {'CHANGED'}   something was asked in between: a request that comes late must not drain a run that
--                                 goes on again, nor let one go on that was to drain
--       every action -> {'GONE'} when the run does not exist
if redis.call('HEXISTS', KEYS[1], 'schema') == 0 then return {'GONE'} end
local action = ARGV[1]
local meta = redis.call('HMGET', KEYS[1], 'revision', 'config_digest', 'wanted_digest', 'draining', 'epoch', 'asked')

if action == 'config' then
  local revision, wanted = meta[1] or '0', meta[3] or ''
  if wanted == ARGV[3] then return {'OK'} end
  if wanted == '' and meta[2] == ARGV[3] then return {'SAME'} end
  if revision ~= ARGV[4] or wanted ~= ARGV[5] then return {'CHANGED', revision, wanted} end
  redis.call('HDEL', KEYS[1], 'refused', 'wanted', 'wanted_digest')
  if meta[2] ~= ARGV[3] then
    redis.call('HSET', KEYS[1], 'wanted', ARGV[2], 'wanted_digest', ARGV[3])
  end
elseif action == 'drain' then
  if meta[4] then return {'OK', meta[4]} end
  if meta[5] ~= ARGV[2] or (meta[6] or '0') ~= ARGV[3] then return {'CHANGED'} end
  local time = redis.call('TIME')
  local clock = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
  redis.call('HSET', KEYS[1], 'draining', clock)
  redis.call('DEL', KEYS[2])
  redis.call('HINCRBY', KEYS[1], 'asked', 1)
  return {'OK', clock}
else
  if not meta[4] then return {'SAME'} end
  if meta[5] ~= ARGV[2] or (meta[6] or '0') ~= ARGV[3] then return {'CHANGED'} end
  redis.call('HDEL', KEYS[1], 'draining')
end
redis.call('HINCRBY', KEYS[1], 'asked', 1)
return {'OK'}
