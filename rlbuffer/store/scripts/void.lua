#!lua flags=allow-oom
-- VOID: an operator takes steps back. What follows a step leaves the run, which goes on from there in a new epoch; a
-- rewind drops everything that is pending as well.
--
-- KEYS  1 lease   2 meta   3 pool   4 steps   5 ledger   6 closed   7 garbage   8 trainer   9 history   10 policy
-- ARGV  1 last step that stays   2 '1': what is pending goes, too   3 '1': although a trainer is at work
--       4 how long a silent trainer counts as at work, ms   5 payload key prefix   6 history entries kept
--       7 history record   8 epoch as the operator saw it
-- Reply {'OK', new epoch, steps void, pending pushes dropped}
--       {'GONE'}            the run does not exist
--       {'CHANGED', epoch}  it is in another epoch: a request that comes late must not take back what came after it
--       {'ALIVE', ms}       the trainer was seen that long ago
--       {'BEYOND', step}    the run ends at this step
--       {'RETIRED', step}   steps up to this one are gone: the run can only go on from it (unless forced)
-- The leader and the trainer are fenced: they begin again from what is here. Trained steps that are void move from
-- trained to dropped, untrained ones from packed. Their groups keep the tombstones of their commit. Policy versions of
-- steps that are void are taken back, and with any step those of all adapters, which count steps of their own; the
-- trainer announces the ones that it resumes with.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local meta = redis.call('HMGET', KEYS[2], 'epoch', 'step', 'retired', 'retired_digest', 'digest')
if not meta[1] then return {'GONE'} end
if meta[1] ~= ARGV[8] then return {'CHANGED', meta[1]} end
local last, keep, retired = tonumber(meta[2] or '0'), tonumber(ARGV[1]), tonumber(meta[3] or '0')
local trainer = redis.call('HMGET', KEYS[8], 'number', 'trained', 'digest', 'oldest_kept', 'seen')
local forced = ARGV[3] == '1'
if trainer[1] and not forced and now - tonumber(trainer[5] or '0') < tonumber(ARGV[4]) then
  return {'ALIVE', string.format('%.0f', now - tonumber(trainer[5] or '0'))}
end
if keep > last then return {'BEYOND', string.format('%.0f', last)} end
if keep < retired and not forced then return {'RETIRED', string.format('%.0f', retired)} end

local function fields_of(list)
  local fields = {}
  for k = 1, #list, 2 do fields[list[k]] = list[k + 1] end
  return fields
end

-- What a client writes is a plain number; what somebody wrote by hand must not stop this half-way, nor be counted.
local function known(value, pattern, otherwise)
  if value and string.match(value, pattern) and (otherwise ~= '0' or #value <= 15) then return value end
  return otherwise
end

-- From here on only writes.
local trained = tonumber(trainer[2] or '0')
local digest = keep == last and meta[5] or keep == retired and meta[4] or trained == keep and trainer[3] or ''
local kept = {}
local found = redis.call('XRANGE', KEYS[4], '-', '+')
for i = 1, #found do
  local id = found[i][1]
  local step, part = string.match(id, '^(%d+)%-(%d+)$')
  if tonumber(step) <= keep then
    kept[#kept + 1] = found[i]
    if part == '0' and tonumber(step) == keep then digest = fields_of(found[i][2]).digest end
  elseif part == '0' then
    local fate = tonumber(step) <= trained and 'trained' or 'packed'
    local packed = fields_of(found[i][2]).packed or ''
    for env, rollouts, tokens, groups in string.gmatch(packed, '(%S+) (%d+) (%d+) (%d+)') do
      for unit, amount in pairs({rollouts = rollouts, tokens = tokens, groups = groups}) do
        redis.pcall('HINCRBY', KEYS[5], env .. ':' .. fate .. ':' .. unit, '-' .. amount)
        redis.pcall('HINCRBY', KEYS[5], env .. ':dropped:void:' .. unit, amount)
      end
    end
  end
end
-- XSETID cannot go back, so the stream is made anew.
redis.call('DEL', KEYS[4])
for i = 1, #kept do redis.call('XADD', KEYS[4], kept[i][1], unpack(kept[i][2])) end
local payloads = redis.call('ZRANGEBYSCORE', KEYS[7], '(' .. ARGV[1], '+inf')
for i = 1, #payloads do redis.call('ZADD', KEYS[7], ARGV[1], payloads[i]) end

local dropped = 0
local newest = redis.call('ZREVRANGE', KEYS[6], 0, 0, 'WITHSCORES')
local closed_at = string.format('%.0f', math.max(now, tonumber(newest[2] or '0')))
while ARGV[2] == '1' do
  local page = redis.call('XRANGE', KEYS[3], '-', '+', 'COUNT', 500)
  if #page == 0 then break end
  for i = 1, #page do
    local entry = fields_of(page[i][2])
    redis.call('XDEL', KEYS[3], page[i][1])
    local fate = known(entry.env, '^[%w_.-]+$', '?') .. ':dropped:void'
    redis.pcall('HINCRBY', KEYS[5], fate .. ':rollouts', known(entry.rollouts, '^%d+$', '0'))
    redis.pcall('HINCRBY', KEYS[5], fate .. ':tokens', known(entry.tokens, '^%d+$', '0'))
    if entry.group and entry.key then
      redis.call('ZADD', KEYS[7], ARGV[1], ARGV[5] .. entry.group .. ':' .. entry.key)
      redis.call('ZADD', KEYS[6], closed_at, entry.group)
    end
    dropped = dropped + 1
  end
end

local policies = redis.call('HGETALL', KEYS[10])
for i = 1, #policies, 2 do
  local version = string.match(policies[i + 1], '^%d+ (%d+) ')
  if tonumber(version) > keep or (policies[i] ~= '' and last > keep) then redis.call('HDEL', KEYS[10], policies[i]) end
end
local epoch = string.format('%.0f', tonumber(meta[1]) + 1)
redis.call('HSET', KEYS[2], 'epoch', epoch, 'since', epoch, 'step', ARGV[1], 'digest', digest or '',
  'retired', string.format('%.0f', math.min(retired, keep)))
if keep < retired then redis.call('HDEL', KEYS[2], 'retired_digest') end
redis.call('HDEL', KEYS[2], 'checkpoint_now', 'ended', 'line')
if trainer[1] then
  redis.call('HSET', KEYS[8], 'number', string.format('%.0f', math.max(now, tonumber(trainer[1]) + 1)), 'uuid', '',
    'trained', string.format('%.0f', math.min(trained, keep)), 'epoch', epoch, 'seen', '0',
    'oldest_kept', string.format('%.0f', math.min(tonumber(trainer[4] or '0'), keep)))
  if trained > keep then redis.call('HSET', KEYS[8], 'digest', digest or '') end
  redis.call('HDEL', KEYS[8], 'claim')
end
local token = redis.call('HGET', KEYS[1], 'token')
if token then
  redis.call('HSET', KEYS[1], 'token', string.format('%.0f', math.max(now, tonumber(token) + 1)), 'until', '0')
end
redis.call('XADD', KEYS[9], 'MAXLEN', '~', ARGV[6], '*', 'record', ARGV[7])
return {'OK', epoch, string.format('%.0f', last - keep), string.format('%.0f', dropped)}
