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
local meta_key, allowance_key = unpack(KEYS)
local action = ARGV[1]
if redis.call('HEXISTS', meta_key, 'schema') == 0 then return {'GONE'} end
local meta = redis.call('HMGET', meta_key, 'revision', 'config_digest', 'wanted_digest', 'draining', 'epoch', 'asked')

if action == 'config' then
  local config, digest, seen_revision, seen_wanted = unpack(ARGV, 2, 5)
  local revision, wanted = meta[1] or '0', meta[3] or ''
  if wanted == digest then return {'OK'} end
  if wanted == '' and meta[2] == digest then return {'SAME'} end
  if revision ~= seen_revision or wanted ~= seen_wanted then return {'CHANGED', revision, wanted} end
  redis.call('HDEL', meta_key, 'refused', 'wanted', 'wanted_digest')
  if meta[2] ~= digest then
    redis.call('HSET', meta_key, 'wanted', config, 'wanted_digest', digest)
  end
elseif action == 'drain' then
  local seen_epoch, seen_asked = ARGV[2], ARGV[3]
  if meta[4] then return {'OK', meta[4]} end
  if meta[5] ~= seen_epoch or (meta[6] or '0') ~= seen_asked then return {'CHANGED'} end
  local time = redis.call('TIME')
  local clock = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
  redis.call('HSET', meta_key, 'draining', clock)
  redis.call('DEL', allowance_key)
  redis.call('HINCRBY', meta_key, 'asked', 1)
  return {'OK', clock}
else
  local seen_epoch, seen_asked = ARGV[2], ARGV[3]
  if not meta[4] then return {'SAME'} end
  if meta[5] ~= seen_epoch or (meta[6] or '0') ~= seen_asked then return {'CHANGED'} end
  redis.call('HDEL', meta_key, 'draining')
end
redis.call('HINCRBY', meta_key, 'asked', 1)
return {'OK'}
