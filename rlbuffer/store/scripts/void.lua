#!lua flags=allow-oom
-- VOID: an operator takes steps back. What follows a step leaves the run, which goes on from there in a new epoch; a
-- rewind drops everything that is pending as well.
--
-- KEYS  1 lease   2 meta   3 pool   4 steps   5 ledger   6 closed   7 garbage   8 trainer   9 history   10 policy
--       11 reuse   12 unused
-- ARGV  1 last step that stays   2 '1': what is pending goes, too   3 '1': although a trainer is at work
--       4 how long a silent trainer counts as at work, ms   5 payload key prefix   6 history entries kept
--       7 history record   8 epoch as the operator saw it   9 '1': versions count what the trainer announces
-- Reply {'OK', new epoch, steps void, pending pushes dropped}
--       {'GONE'}            the run does not exist
--       {'CHANGED', epoch}  it is in another epoch: a request that comes late must not take back what came after it
--       {'ALIVE', ms}       the trainer was seen that long ago, and has not said that it made its last step
--       {'BEYOND', step}    the run ends at this step
--       {'RETIRED', step}   steps up to this one are gone: the run can only go on from it (unless forced)
-- The leader and the trainer are fenced: they begin again from what is here. Trained steps that are void move from
-- trained to dropped (what was given and not trained of them is dropped already, as unused, and then as void), untrained
-- ones from packed; further uses in them are counted no more. A group of a void step that
-- waits for another use is let go, also when an earlier use of it stays, by which it counts. All tombstones are as new:
-- what is void must not age them. Policy versions of steps that are void are taken back, and with any step those of all
-- adapters, which count steps of their own; the trainer announces the ones that it resumes with. Announced ones stay: no
-- number of theirs is given again.
local lease_key, meta_key, pool_key, steps_key, ledger_key, closed_key, garbage_key, trainer_key, history_key,
  policy_key, reuse_key, unused_key = unpack(KEYS)
local kept_step, drops_pending, force, silent_ms, prefix, history_kept, record, seen_epoch, announces
  = unpack(ARGV, 1, 9)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local meta = redis.call('HMGET', meta_key, 'epoch', 'step', 'retired', 'retired_digest', 'digest')
if not meta[1] then return {'GONE'} end
if meta[1] ~= seen_epoch then return {'CHANGED', meta[1]} end
local last, keep, retired = tonumber(meta[2] or '0'), tonumber(kept_step), tonumber(meta[3] or '0')
local trainer = redis.call('HMGET', trainer_key, 'number', 'trained', 'digest', 'oldest_kept', 'seen', 'finished')
local forced = force == '1'
local silent = math.abs(now - tonumber(trainer[5] or '0'))  -- later than now: before the clock was set back
if trainer[1] and trainer[6] ~= trainer[1] and not forced and silent < tonumber(silent_ms) then
  return {'ALIVE', string.format('%.0f', silent)}
end
if keep > last then return {'BEYOND', string.format('%.0f', last)} end
if keep < retired and not forced then return {'RETIRED', string.format('%.0f', retired)} end

local function fields_of(list)
  local fields = {}
  for k = 1, #list, 2 do fields[list[k]] = list[k + 1] end
  return fields
end

-- What a client writes is a plain number; what somebody wrote by hand must not stop this half-way, nor be counted.
local function plain_value(value, pattern, default)
  if value and string.match(value, pattern) and (default ~= '0' or #value <= 15) then return value end
  return default
end

local reuse, is_void = redis.call('HGETALL', reuse_key), {}
for i = 1, #reuse, 2 do
  local last_use = string.match(reuse[i + 1], '^%d+ (%d+)$')
  if last_use and tonumber(last_use) > keep then is_void[reuse[i]] = true end
end

-- From here on only writes.
local trained = tonumber(trainer[2] or '0')
local digest = keep == last and meta[5] or keep == retired and meta[4] or trained == keep and trainer[3] or ''
local kept = {}
local found = redis.call('XRANGE', steps_key, '-', '+')
for i = 1, #found do
  local id = found[i][1]
  local step, part = string.match(id, '^(%d+)%-(%d+)$')
  if tonumber(step) <= keep then
    kept[#kept + 1] = found[i]
    if part == '0' and tonumber(step) == keep then digest = fields_of(found[i][2]).digest end
  elseif part == '0' then
    local fate = tonumber(step) <= trained and 'trained' or 'packed'
    local header = fields_of(found[i][2])
    local unused_line = redis.pcall('HGET', unused_key, step)
    local unused_env, unused_rollouts, unused_tokens =
      string.match(type(unused_line) == 'string' and unused_line or '', '^(%S+) (%d+) (%d+) ')
    if unused_env then redis.call('HDEL', unused_key, step) end
    for env, rollouts, tokens, groups in string.gmatch(header.packed or '', '(%S+) (%d+) (%d+) (%d+)') do
      for unit, amount in pairs({rollouts = rollouts, tokens = tokens, groups = groups}) do
        local left = '0'
        if fate == 'trained' and env == unused_env then
          local is_unused = unused_rollouts == rollouts
          left = ({rollouts = unused_rollouts, tokens = unused_tokens, groups = is_unused and groups or '0'})[unit]
        end
        local trains = string.format('%.0f', tonumber(left) - tonumber(amount))
        redis.pcall('HINCRBY', ledger_key, env .. ':' .. fate .. ':' .. unit, trains)
        if left ~= '0' then redis.pcall('HINCRBY', ledger_key, env .. ':dropped:unused:' .. unit, '-' .. left) end
        redis.pcall('HINCRBY', ledger_key, env .. ':dropped:void:' .. unit, amount)
      end
    end
    for env, rollouts, tokens in string.gmatch(header.reused or '', '(%S+) (%d+) (%d+)') do
      redis.pcall('HINCRBY', ledger_key, env .. ':reused:rollouts', '-' .. rollouts)
      redis.pcall('HINCRBY', ledger_key, env .. ':reused:tokens', '-' .. tokens)
    end
  end
end
-- XSETID cannot go back, so the stream is made anew.
redis.call('DEL', steps_key)
for i = 1, #kept do redis.call('XADD', steps_key, kept[i][1], unpack(kept[i][2])) end
local payloads = redis.call('ZRANGEBYSCORE', garbage_key, '(' .. kept_step, '+inf')
for i = 1, #payloads do redis.call('ZADD', garbage_key, kept_step, payloads[i]) end
for i = 1, #reuse, 2 do
  local group, suffix = string.match(reuse[i], '^%S+'), string.match(reuse[i + 1], '^%S+ (%S+) ')
  if is_void[group] then
    redis.call('HDEL', reuse_key, reuse[i])
    if suffix then redis.call('ZADD', garbage_key, kept_step, prefix .. group .. ':' .. suffix) end
  end
end

local dropped = 0
local newest = redis.call('ZREVRANGE', closed_key, 0, 0, 'WITHSCORES')
local closed_at = string.format('%.0f', math.max(now, tonumber(newest[2] or '0')))
while drops_pending == '1' do
  local page = redis.call('XRANGE', pool_key, '-', '+', 'COUNT', 500)
  if #page == 0 then break end
  for i = 1, #page do
    local entry = fields_of(page[i][2])
    redis.call('XDEL', pool_key, page[i][1])
    local fate = plain_value(entry.env, '^[%w_.-]+$', '?') .. ':dropped:void'
    redis.pcall('HINCRBY', ledger_key, fate .. ':rollouts', plain_value(entry.rollouts, '^%d+$', '0'))
    redis.pcall('HINCRBY', ledger_key, fate .. ':tokens', plain_value(entry.tokens, '^%d+$', '0'))
    if entry.group and entry.key then
      redis.call('ZADD', garbage_key, kept_step, prefix .. entry.group .. ':' .. entry.key)
      redis.call('ZADD', closed_key, closed_at, entry.group)
    end
    dropped = dropped + 1
  end
end

-- COMMIT counts steps from here on again: the summary's lines of those that are void are none of them.
local closed = redis.call('ZRANGE', closed_key, 0, -1)
for i = 1, #closed do redis.call('ZADD', closed_key, closed_at, closed[i]) end

local policies = redis.call('HGETALL', policy_key)
for i = 1, #policies, 2 do
  local version = string.match(policies[i + 1], '^%d+ (%d+) ')
  local is_void = tonumber(version) > keep or (policies[i] ~= '' and last > keep)
  if is_void and announces ~= '1' then redis.call('HDEL', policy_key, policies[i]) end
end
local epoch = string.format('%.0f', tonumber(meta[1]) + 1)
redis.call('HSET', meta_key, 'epoch', epoch, 'since', epoch, 'step', kept_step, 'digest', digest or '',
  'retired', string.format('%.0f', math.min(retired, keep)))
if keep < retired then redis.call('HDEL', meta_key, 'retired_digest') end
redis.call('HDEL', meta_key, 'checkpoint_now', 'ended', 'line')
if trainer[1] then
  redis.call('HSET', trainer_key, 'number', string.format('%.0f', math.max(now, tonumber(trainer[1]) + 1)), 'uuid', '',
    'trained', string.format('%.0f', math.min(trained, keep)), 'epoch', epoch, 'seen', '0',
    'oldest_kept', string.format('%.0f', math.min(tonumber(trainer[4] or '0'), keep)))
  if trained > keep then redis.call('HSET', trainer_key, 'digest', digest or '') end
  redis.call('HDEL', trainer_key, 'claim', 'hand')
end
if redis.call('HEXISTS', lease_key, 'until') == 1 then redis.call('HSET', lease_key, 'until', '0') end
redis.call('XADD', history_key, 'MAXLEN', '~', history_kept, '*', 'record', record)
return {'OK', epoch, string.format('%.0f', last - keep), string.format('%.0f', dropped)}
