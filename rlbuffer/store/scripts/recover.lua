#!lua flags=allow-oom
-- RECOVER: the server has lost steps that the trainer has trained. The run goes on after the trainer's last step, in a
-- new epoch, and nothing of what was trained stays pending.
--
-- KEYS  1 lease   2 meta   3 pool   4 steps   5 ledger   6 closed   7 garbage   8 trainer   9 history   10 reuse
--       11 unused
-- ARGV  1 token   2 attempt number   3 the claim, as it stands in `trainer`   4 its step   5 its digest   6 its epoch
--       7 first step that is here with other content than the trainer's ('0': none)   8 payload key prefix
--       9 history entries kept   10 history record   11 as REPORT: what was given and not trained of the claimed steps
--       12 groups G, then G of: group id, env ('' when nothing of it is pending), and what its groups count as
--       then entries E, then E of: id, trained rollouts, trained tokens, dropped D, D of (reason, rollouts, tokens)
-- Reply {'OK', new epoch}
--       {'NONE'}            this claim is not there (any more): it was carried out, or replaced by a newer one
--       {'FENCED', owner}   the token is not the current one, or the lease has expired
--       {'UNEQUAL', id, rollouts, tokens}  an entry holds this, not what is given
-- Steps here that the trainer has, too, count as trained, but for what was given and not trained of them; steps of other
-- content are void (their groups have tombstones since their commit). A group that waits for another use is let go when
-- it was in a lost step, because it has been used more often than is known here, and when it is in a step that is void.
-- The stream is deleted, not trimmed: after a deletion a smaller step may come next.
local lease_key, meta_key, pool_key, steps_key, ledger_key, closed_key, garbage_key, trainer_key, history_key,
  reuse_key, unused_key = unpack(KEYS)
local token, attempt, claim, claimed_step, claimed_digest, claimed_epoch, first_other, prefix, history_kept, record,
  unused_lines, group_count = unpack(ARGV, 1, 12)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease = redis.call('HMGET', lease_key, 'owner', 'until', 'token')
if lease[3] ~= token or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end
local trainer = redis.call('HMGET', trainer_key, 'number', 'claim', 'trained')
if trainer[1] ~= attempt or trainer[2] ~= claim then return {'NONE'} end

local function fields_of(found)
  if #found == 0 then return nil end
  local fields = {}
  for k = 1, #found[1][2], 2 do fields[found[1][2][k]] = found[1][2][k + 1] end
  return fields
end

local p = 13 + 3 * tonumber(group_count)
local entries = {}
local count = tonumber(ARGV[p])
p = p + 1
for _ = 1, count do
  local use = {id = ARGV[p], rollouts = ARGV[p + 1], tokens = ARGV[p + 2], dropped = {}}
  local rows, rollouts, tokens = tonumber(ARGV[p + 3]), tonumber(ARGV[p + 1]), tonumber(ARGV[p + 2])
  p = p + 4
  for _ = 1, rows do
    use.dropped[#use.dropped + 1] = {unpack(ARGV, p, p + 2)}
    rollouts, tokens = rollouts + tonumber(ARGV[p + 1]), tokens + tonumber(ARGV[p + 2])
    p = p + 3
  end
  local entry = fields_of(redis.call('XRANGE', pool_key, use.id, use.id))
  if entry then
    if tonumber(entry.rollouts) ~= rollouts or tonumber(entry.tokens) ~= tokens then
      return {'UNEQUAL', use.id, entry.rollouts or '', entry.tokens or ''}
    end
    use.env = entry.env
    use.key = prefix .. entry.group .. ':' .. entry.key
    entries[#entries + 1] = use
  end
end
local reuse = redis.call('HGETALL', reuse_key)

-- From here on only writes.
local newest = redis.call('ZREVRANGE', closed_key, 0, 0, 'WITHSCORES')
local closed_at = string.format('%.0f', math.max(now, tonumber(newest[2] or '0')))
local meta = redis.call('HMGET', meta_key, 'epoch', 'step')
local fork = tonumber(first_other)
local before = tonumber(trainer[3] or '0')
local unused = {}
for step, env, rollouts, tokens, encoded_record in string.gmatch(unused_lines, '(%d+) (%S+) (%d+) (%d+) %x+ (%x+)\n') do
  unused[step] = {env = env, rollouts = rollouts, tokens = tokens}
  if tonumber(step) > before then
    local drop = string.gsub(encoded_record, '%x%x', function(digits) return string.char(tonumber(digits, 16)) end)
    redis.pcall('XADD', history_key, 'MAXLEN', '~', history_kept, '*', 'record', drop)
  end
end
for step = before + 1, tonumber(meta[2] or '0') do
  local id = string.format('%.0f-0', step)
  local header = fields_of(redis.call('XRANGE', steps_key, id, id))
  local fate = fork > 0 and step >= fork and 'dropped:void' or 'trained'
  local left = fate == 'trained' and unused[string.format('%.0f', step)] or {}
  for env, rollouts, tokens, groups in string.gmatch(header and header.packed or '', '(%S+) (%d+) (%d+) (%d+)') do
    local not_trained = env == left.env and
      {rollouts = left.rollouts, tokens = left.tokens, groups = left.rollouts == rollouts and groups or '0'} or {}
    for unit, amount in pairs({rollouts = rollouts, tokens = tokens, groups = groups}) do
      local unused_amount = not_trained[unit] or '0'
      local rest = string.format('%.0f', tonumber(amount) - tonumber(unused_amount))
      redis.pcall('HINCRBY', ledger_key, env .. ':packed:' .. unit, '-' .. amount)
      redis.pcall('HINCRBY', ledger_key, env .. ':' .. fate .. ':' .. unit, rest)
      if unused_amount ~= '0' then redis.pcall('HINCRBY', ledger_key, env .. ':dropped:unused:' .. unit, unused_amount) end
    end
  end
  local again = fate == 'trained' and 0 or -1  -- further uses in a step that is void are counted no more
  for env, rollouts, tokens in string.gmatch(header and header.reused or '', '(%S+) (%d+) (%d+)') do
    redis.pcall('HINCRBY', ledger_key, env .. ':reused:rollouts', string.format('%.0f', again * tonumber(rollouts)))
    redis.pcall('HINCRBY', ledger_key, env .. ':reused:tokens', string.format('%.0f', again * tonumber(tokens)))
  end
end
for i = 1, #entries do
  local use = entries[i]
  redis.call('XDEL', pool_key, use.id)
  redis.pcall('HINCRBY', ledger_key, use.env .. ':trained:rollouts', use.rollouts)
  redis.pcall('HINCRBY', ledger_key, use.env .. ':trained:tokens', use.tokens)
  for k = 1, #use.dropped do
    local reason, rollouts, tokens = unpack(use.dropped[k])
    local fate = use.env .. ':dropped:' .. reason
    redis.pcall('HINCRBY', ledger_key, fate .. ':rollouts', rollouts)
    redis.pcall('HINCRBY', ledger_key, fate .. ':tokens', tokens)
  end
  redis.call('ZADD', garbage_key, claimed_step, use.key)
end
local lost = {}
for i = 13, 12 + 3 * tonumber(group_count), 3 do
  lost[ARGV[i]] = true
  redis.call('ZADD', closed_key, closed_at, ARGV[i])
  if ARGV[i + 1] ~= '' then redis.pcall('HINCRBY', ledger_key, ARGV[i + 1] .. ':' .. ARGV[i + 2] .. ':groups', 1) end
end
for i = 1, #reuse, 2 do
  local last_use = string.match(reuse[i + 1], '^%d+ (%d+)$')
  if last_use and fork > 0 and tonumber(last_use) >= fork then lost[reuse[i]] = true end
end
for i = 1, #reuse, 2 do
  local group, entry = string.match(reuse[i], '^(%S+) ?(%S*)$')
  if lost[group] then
    redis.call('HDEL', reuse_key, reuse[i])
    if entry ~= '' then
      redis.call('ZADD', garbage_key, claimed_step, prefix .. group .. ':' .. string.match(reuse[i + 1], '^%S+ (%S+) '))
    end
  end
end
redis.call('DEL', steps_key, unused_key)
local epoch = string.format('%.0f', math.max(tonumber(meta[1]), tonumber(claimed_epoch)) + 1)
redis.call('HSET', meta_key, 'epoch', epoch, 'step', claimed_step, 'digest', claimed_digest,
  'retired', claimed_step, 'retired_digest', claimed_digest, 'recovered', claimed_step, 'checkpoint_now', claimed_step)
redis.call('HDEL', meta_key, 'ended')
redis.call('HSET', trainer_key, 'trained', claimed_step, 'digest', claimed_digest, 'epoch', epoch)
redis.call('HDEL', trainer_key, 'claim')
redis.call('XADD', history_key, 'MAXLEN', '~', history_kept, '*', 'record', record)
return {'OK', epoch}
