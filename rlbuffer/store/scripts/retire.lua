#!lua flags=allow-oom
-- RETIRE: steps that no checkpoint needs any more leave the stream; never one that was not trained. Their payloads are
-- swept afterwards by the caller, because they live in other slots. The digest of the last one stays: a run that is
-- taken back to it goes on with the same chain.
--
-- KEYS  1 lease   2 meta   3 steps   4 trainer   5 history   6 unused
-- ARGV  1 token   2 last step that may go
--       3 record of an early retirement, because memory is short and whether or not a checkpoint holds the steps; '' else
--       4 history entries kept
-- An early one stays in meta as `early` (last step) and `early_at` (server ms): a trainer that needs such a step is told.
-- Reply {'OK', last retired step} | {'FENCED', owner}
local lease_key, meta_key, steps_key, trainer_key, history_key, unused_key = unpack(KEYS)
local token, last_step, record, history_kept = unpack(ARGV, 1, 4)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease = redis.call('HMGET', lease_key, 'owner', 'until', 'token')
if lease[3] ~= token or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end

local meta = redis.call('HMGET', meta_key, 'step', 'retired')
local trained = tonumber(redis.call('HGET', trainer_key, 'trained') or '0')
local retired = tonumber(meta[2] or '0')
local up_to = math.min(tonumber(last_step), tonumber(meta[1] or '0'), trained)
if up_to > retired then
  local id = string.format('%.0f-0', up_to)
  local found, digest = redis.call('XRANGE', steps_key, id, id), ''
  for k = 1, #found > 0 and #found[1][2] or 0, 2 do
    if found[1][2][k] == 'digest' then digest = found[1][2][k + 1] end
  end
  redis.call('XTRIM', steps_key, 'MINID', string.format('%.0f-0', up_to + 1))
  local unused_steps = redis.pcall('HKEYS', unused_key)
  for i = 1, #unused_steps do
    if (tonumber(unused_steps[i]) or math.huge) <= up_to then redis.call('HDEL', unused_key, unused_steps[i]) end
  end
  retired = up_to
  redis.call('HSET', meta_key, 'retired', string.format('%.0f', retired), 'retired_digest', digest)
  if record ~= '' then
    redis.call('HSET', meta_key, 'early', string.format('%.0f', retired), 'early_at', string.format('%.0f', now))
    redis.call('XADD', history_key, 'MAXLEN', '~', history_kept, '*', 'record', record)
  end
end
return {'OK', string.format('%.0f', retired)}
