#!lua flags=allow-oom
-- OPEN: a run's meta, if there is none. Its first epoch is the server's clock at this moment, so that a run that was
-- deleted and made anew is in a later epoch than any that the deleted one began: whoever still works for that one is told.
-- What is left of a run whose meta is gone belongs to no epoch: nothing begins beside it.
--
-- KEYS  1 meta   2... what only a run with a meta writes
-- ARGV  1 schema
-- Reply {'OK'} | {'THERE'}
--       {'LEFT', key...}  there is no meta, but these keys of the run are there
local meta_key, schema = KEYS[1], ARGV[1]
if redis.call('HEXISTS', meta_key, 'schema') == 1 then return {'THERE'} end
local left = {}
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then left[#left + 1] = KEYS[i] end
end
if #left > 0 then return {'LEFT', unpack(left)} end
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('HSET', meta_key, 'schema', schema, 'epoch', now, 'since', now, 'step', '0', 'digest', '', 'retired', '0',
  'created', now)
return {'OK'}
