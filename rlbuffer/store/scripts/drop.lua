#!lua flags=allow-oom
-- DROP: pending pushes that will not be trained. What is no longer pending is passed over, so a repeated call changes
-- nothing. What was trained before and waits for another use is released by the leader: it has its place in the ledger
-- already. An operator drops what is pending.
--
-- KEYS  1 lease   2 pool   3 ledger   4 closed   5 garbage   6 history   7 meta   8 reuse
-- ARGV  1 token; '' for an operator, who needs no lease: the leader is told to read everything again
--       2 payload key prefix   3 history entries kept   4 drops D, then D of
--       group id, env, reason, '1' when the whole group closes (tombstone), history record ('' for none), ids N, N ids
-- Reply {'OK', pushes dropped} | {'FENCED', owner} | {'GONE'} when there is no run that an operator could drop of
local lease_key, pool_key, ledger_key, closed_key, garbage_key, history_key, meta_key, reuse_key = unpack(KEYS)
local token, prefix, history_kept, drops = unpack(ARGV, 1, 4)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if token == '' then
  if redis.call('HEXISTS', meta_key, 'schema') == 0 then return {'GONE'} end
else
  local lease = redis.call('HMGET', lease_key, 'owner', 'until', 'token')
  if lease[3] ~= token or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end
end

-- An entry that did not come through PUSH may hold anything, or nothing: it must go all the same.
local function plain_value(value, pattern, default)
  if value and string.match(value, pattern) and (default ~= '0' or #value <= 15) then return value end
  return default
end

local step = redis.call('HGET', meta_key, 'step') or '0'
local newest = redis.call('ZREVRANGE', closed_key, 0, 0, 'WITHSCORES')
local closed_at = string.format('%.0f', math.max(now, tonumber(newest[2] or '0')))
local total, p = 0, 5
for _ = 1, tonumber(drops) do
  local group, env, reason, closes, record, ids =
    ARGV[p], ARGV[p + 1], ARGV[p + 2], ARGV[p + 3], ARGV[p + 4], tonumber(ARGV[p + 5])
  p = p + 6
  local dropped = 0
  for i = p, p + ids - 1 do
    local found = redis.call('XRANGE', pool_key, ARGV[i], ARGV[i])
    if #found == 1 and redis.call('XDEL', pool_key, ARGV[i]) == 1 then
      local fields, entry = found[1][2], {}
      for k = 1, #fields, 2 do entry[fields[k]] = fields[k + 1] end
      local fate = plain_value(entry.env, '^[%w_.-]+$', '?') .. ':dropped:' .. reason
      redis.pcall('HINCRBY', ledger_key, fate .. ':rollouts', plain_value(entry.rollouts, '^%d+$', '0'))
      redis.pcall('HINCRBY', ledger_key, fate .. ':tokens', plain_value(entry.tokens, '^%d+$', '0'))
      if entry.group and entry.key then
        redis.call('ZADD', garbage_key, step, prefix .. entry.group .. ':' .. entry.key)
      end
      dropped = dropped + 1
    elseif token ~= '' then
      -- Only the leader names all that a group holds; what an operator has read may be a part, and trained meanwhile.
      local record = redis.call('HGET', reuse_key, group .. ' ' .. ARGV[i])
      if record then
        redis.call('HDEL', reuse_key, group .. ' ' .. ARGV[i], group)
        redis.call('ZADD', garbage_key, step, prefix .. group .. ':' .. string.match(record, '^%S+ (%S+) '))
      end
    end
  end
  p = p + ids
  if dropped > 0 then
    if closes == '1' then
      -- What is late of a group that was trained, or dropped before, makes no second group of it.
      if not redis.call('ZSCORE', closed_key, group) then
        redis.pcall('HINCRBY', ledger_key, plain_value(env, '^[%w_.-]+$', '?') .. ':dropped:' .. reason .. ':groups', 1)
      end
      redis.call('ZADD', closed_key, closed_at, group)
    end
    if record ~= '' then redis.call('XADD', history_key, 'MAXLEN', '~', history_kept, '*', 'record', record) end
  end
  total = total + dropped
end
if token == '' then redis.call('HINCRBY', meta_key, 'asked', 1) end
return {'OK', total}
