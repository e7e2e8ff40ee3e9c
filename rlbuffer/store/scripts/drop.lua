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
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if ARGV[1] == '' then
  if redis.call('HEXISTS', KEYS[7], 'schema') == 0 then return {'GONE'} end
else
  local lease = redis.call('HMGET', KEYS[1], 'owner', 'until', 'token')
  if lease[3] ~= ARGV[1] or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end
end

-- An entry that did not come through PUSH may hold anything, or nothing: it must go all the same.
local function known(value, pattern, otherwise)
  if value and string.match(value, pattern) and (otherwise ~= '0' or #value <= 15) then return value end
  return otherwise
end

local step = redis.call('HGET', KEYS[7], 'step') or '0'
local newest = redis.call('ZREVRANGE', KEYS[4], 0, 0, 'WITHSCORES')
local closed_at = string.format('%.0f', math.max(now, tonumber(newest[2] or '0')))
local total, p = 0, 5
for _ = 1, tonumber(ARGV[4]) do
  local group, env, reason, closes, record, ids =
    ARGV[p], ARGV[p + 1], ARGV[p + 2], ARGV[p + 3], ARGV[p + 4], tonumber(ARGV[p + 5])
  p = p + 6
  local dropped = 0
  for i = p, p + ids - 1 do
    local found = redis.call('XRANGE', KEYS[2], ARGV[i], ARGV[i])
    if #found == 1 and redis.call('XDEL', KEYS[2], ARGV[i]) == 1 then
      local fields, entry = found[1][2], {}
      for k = 1, #fields, 2 do entry[fields[k]] = fields[k + 1] end
      local fate = known(entry.env, '^[%w_.-]+$', '?') .. ':dropped:' .. reason
      redis.pcall('HINCRBY', KEYS[3], fate .. ':rollouts', known(entry.rollouts, '^%d+$', '0'))
      redis.pcall('HINCRBY', KEYS[3], fate .. ':tokens', known(entry.tokens, '^%d+$', '0'))
      if entry.group and entry.key then
        redis.call('ZADD', KEYS[5], step, ARGV[2] .. entry.group .. ':' .. entry.key)
      end
      dropped = dropped + 1
    elseif ARGV[1] ~= '' then
      -- Only the leader names all that a group holds; what an operator has read may be a part, and trained meanwhile.
      local record = redis.call('HGET', KEYS[8], group .. ' ' .. ARGV[i])
      if record then
        redis.call('HDEL', KEYS[8], group .. ' ' .. ARGV[i], group)
        redis.call('ZADD', KEYS[5], step, ARGV[2] .. group .. ':' .. string.match(record, '^%S+ (%S+) '))
      end
    end
  end
  p = p + ids
  if dropped > 0 then
    if closes == '1' then
      -- What is late of a group that was trained, or dropped before, makes no second group of it.
      if not redis.call('ZSCORE', KEYS[4], group) then
        redis.pcall('HINCRBY', KEYS[3], known(env, '^[%w_.-]+$', '?') .. ':dropped:' .. reason .. ':groups', 1)
      end
      redis.call('ZADD', KEYS[4], closed_at, group)
    end
    if record ~= '' then redis.call('XADD', KEYS[6], 'MAXLEN', '~', ARGV[3], '*', 'record', record) end
  end
  total = total + dropped
end
if ARGV[1] == '' then redis.call('HINCRBY', KEYS[7], 'asked', 1) end
return {'OK', total}
