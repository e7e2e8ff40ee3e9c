#!lua flags=allow-oom
-- OPEN: a run's meta, if there is none. Its first epoch is the server's clock at this moment, so that a run that was
-- deleted and made anew is in a later epoch than any that the deleted one began: whoever still works for that one is told.
--
-- KEYS  1 meta
-- ARGV  1 schema
-- Reply {'OK'} | {'THERE'}
if redis.call('HEXISTS', KEYS[1], 'schema') == 1 then return {'THERE'} end
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'epoch', now, 'since', now, 'step', '0', 'digest', '', 'retired', '0',
  'created', now)
return {'OK'}
