#!lua flags=allow-oom
-- COMMIT: a planned step becomes immutable, and everything that it consumes leaves the pool, in one move.
--
-- KEYS  1 lease   2 pool   3 steps   4 meta   5 ledger   6 closed   7 garbage   8 history   9 summary   10 state
--       11 reuse
-- ARGV  1 token   2 epoch   3 step   4 digest of the step before ('' for step 1)   5 digest of this step
--       6 payload key prefix   7 tombstones: how old, ms, and how many steps   8 history entries kept   9 summary lines kept
--       10 header   11 the batcher's state   12 summary line   13 history record
--       14 entries, a line each: id, group ('' while it is pending, else whose reuse record holds it), packed rollouts,
--         packed tokens, and for what is dropped of it reason, rollouts, tokens; a space between two of them
--       15 groups, a line each: group id, env, uses before this step, 1 when it is kept for another use, else 0
--       16... parts, in the order of ranks
-- Reply {'OK', committed at, server ms}
--       {'DUP'}                this very step is committed already
--       {'FENCED', owner}      the token is not the current one, or the lease has expired
--       {'ORDER', epoch, step} the run is not at the epoch, step and digest that this one follows
--       {'GONE', id...}        these entries are not pending any more, or their group was used another number of times
--       {'TWICE', id}          an entry is named twice
--       {'UNEQUAL', id, rollouts, tokens}  packed and dropped do not add up to what the entry holds, which is this
-- Of ARGV 7, "<ms> <steps>": a tombstone goes when it is that old, and that many steps were committed between it and the
-- oldest step that is here, that one included; with 0 steps none goes. Their scores never fall, also when the clock is set
-- back, so that they tell the order.
-- `reuse` has for a group that may be used again a field `<group>`: "<uses> <last step>", and a field `<group> <id>` for
-- each of its entries: "<env> <payload suffix> <rollouts> <tokens> <metadata>". The first use of a group moves the ledger,
-- later ones are counted beside it as `reused`, and stand in the step as that, for VOID and RECOVER.
local lease_key, pool_key, steps_key, meta_key, ledger_key, closed_key, garbage_key, history_key, summary_key,
  state_key, reuse_key = unpack(KEYS)
local token, epoch, number, previous, digest, prefix, tombstones, history_kept, summary_kept, new_header,
  new_state, summary_line, history_line, new_entries, new_groups = unpack(ARGV, 1, 15)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local clock = string.format('%.0f', now)
local lease = redis.call('HMGET', lease_key, 'owner', 'until', 'token')
if lease[3] ~= token or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end

local meta = redis.call('HMGET', meta_key, 'epoch', 'step', 'digest')
local last, step = tonumber(meta[2] or '0'), tonumber(number)
if meta[1] == epoch and step == last and meta[3] == digest then return {'DUP'} end
if meta[1] ~= epoch or step ~= last + 1 or (meta[3] or '') ~= previous then
  return {'ORDER', meta[1] or '', string.format('%.0f', last)}
end

local groups, kept, changed, has_reuse = {}, {}, {}, redis.call('EXISTS', reuse_key) == 1
for group, env, uses, keeps in string.gmatch(new_groups, '(%S+) (%S+) (%d+) ([01])\n') do
  local recorded_uses = string.match(has_reuse and redis.call('HGET', reuse_key, group) or '0', '^%d+')
  groups[#groups + 1] = {id = group, env = env, before = tonumber(recorded_uses)}
  kept[group], changed[group] = keeps == '1', recorded_uses ~= uses
end

-- A list for each value: a table for each entry would be most of what an entry costs.
local ids, envs, group_ids, payloads, packed_rollouts, packed_tokens = {}, {}, {}, {}, {}, {}
local fates, is_again, reuse_records, seen, gone, entry = {}, {}, {}, {}, {}, {}
local of_entry, of_reason = '(%S+) (%S*) (%d+) (%d+)([^\n]*)\n', '(%S+) (%d+) (%d+)'
for id, used_group, rollouts, tokens, dropped in string.gmatch(new_entries, of_entry) do
  if seen[id] then return {'TWICE', id} end
  seen[id] = true
  local record = used_group ~= '' and redis.call('HGET', reuse_key, used_group .. ' ' .. id)
  local found = used_group == '' and redis.call('XRANGE', pool_key, id, id)
  local fields = found and found[1] and found[1][2]
  local env, group, suffix
  if record then
    group, env, suffix = used_group, string.match(record, '^(%S+) (%S+) ')
  elseif fields then
    entry.env, entry.group, entry.key, entry.rollouts, entry.tokens, entry.metadata = nil
    for k = 1, #fields, 2 do entry[fields[k]] = fields[k + 1] end
    local total_rollouts, total_tokens = tonumber(rollouts), tonumber(tokens)
    for _, more_rollouts, more_tokens in string.gmatch(dropped, of_reason) do
      total_rollouts, total_tokens = total_rollouts + tonumber(more_rollouts), total_tokens + tonumber(more_tokens)
    end
    if tonumber(entry.rollouts) ~= total_rollouts or tonumber(entry.tokens) ~= total_tokens then
      return {'UNEQUAL', id, entry.rollouts or '', entry.tokens or ''}
    end
    env, group, suffix = entry.env, entry.group, entry.key
  end
  if not (env and group and suffix) or changed[group] then
    gone[#gone + 1] = id
  else
    local n = #ids + 1
    ids[n], envs[n], group_ids[n], payloads[n] = id, env, group, prefix .. group .. ':' .. suffix
    packed_rollouts[n], packed_tokens[n], fates[n], is_again[n] = rollouts, tokens, dropped, used_group ~= ''
    reuse_records[n] = fields and kept[group]
      and table.concat({env, suffix, entry.rollouts, entry.tokens, entry.metadata or ''}, ' ')
  end
end
if #gone > 0 then
  table.insert(gone, 1, 'GONE')
  return gone
end

-- One command takes many words, but a script cannot unpack more than some thousands.
local function in_batches(command, key, words)
  for i = 1, #words, 1000 do redis.call(command, key, unpack(words, i, math.min(i + 999, #words))) end
end
local function add(words, score, member)
  words[#words + 1] = score
  words[#words + 1] = member
end

-- From here on only writes. XDEL goes first: it frees memory before anything is added.
in_batches('XDEL', pool_key, ids)

local newest = redis.call('ZREVRANGE', closed_key, 0, 0, 'WITHSCORES')
local closed_at = string.format('%.0f', math.max(now, tonumber(newest[2] or '0')))
local order, packed, again, closed, garbage = {}, {}, {}, {}, {}
local function account(env)
  if not packed[env] then
    packed[env] = {0, 0, 0}
    order[#order + 1] = env
  end
  return packed[env]
end
for i = 1, #ids do
  local env = envs[i]
  if is_again[i] then
    redis.pcall('HINCRBY', ledger_key, env .. ':reused:rollouts', packed_rollouts[i])
    redis.pcall('HINCRBY', ledger_key, env .. ':reused:tokens', packed_tokens[i])
    local sums = again[env] or {0, 0}
    again[env] = {sums[1] + packed_rollouts[i], sums[2] + packed_tokens[i]}
  else
    local sums = account(env)
    sums[1], sums[2] = sums[1] + packed_rollouts[i], sums[2] + packed_tokens[i]
  end
  for reason, rollouts, tokens in string.gmatch(fates[i], of_reason) do
    local fate = env .. ':dropped:' .. reason
    redis.pcall('HINCRBY', ledger_key, fate .. ':rollouts', rollouts)
    redis.pcall('HINCRBY', ledger_key, fate .. ':tokens', tokens)
  end
  if reuse_records[i] then
    redis.call('HSET', reuse_key, group_ids[i] .. ' ' .. ids[i], reuse_records[i])
  elseif not kept[group_ids[i]] then
    if is_again[i] then redis.call('HDEL', reuse_key, group_ids[i] .. ' ' .. ids[i]) end
    add(garbage, number, payloads[i])
  end
end
for i = 1, #groups do
  local group = groups[i]
  add(closed, closed_at, group.id)
  if group.before == 0 then
    local sums = account(group.env)
    sums[3] = sums[3] + 1
  end
  if kept[group.id] then
    redis.call('HSET', reuse_key, group.id, string.format('%.0f %.0f', group.before + 1, step))
  elseif group.before > 0 then
    redis.call('HDEL', reuse_key, group.id)
  end
end
in_batches('ZADD', garbage_key, garbage)
in_batches('ZADD', closed_key, closed)
-- The totals stand beside the header in plain text, so that REPORT and VOID move them without reading the header.
local totals = {}
for i = 1, #order do
  local env, sums = order[i], packed[order[i]]
  redis.pcall('HINCRBY', ledger_key, env .. ':packed:rollouts', string.format('%.0f', sums[1]))
  redis.pcall('HINCRBY', ledger_key, env .. ':packed:tokens', string.format('%.0f', sums[2]))
  redis.pcall('HINCRBY', ledger_key, env .. ':packed:groups', string.format('%.0f', sums[3]))
  totals[i] = string.format('%s %.0f %.0f %.0f', env, sums[1], sums[2], sums[3])
end
local header = {'header', new_header, 'digest', digest, 'at', clock, 'packed', table.concat(totals, ' ')}
local reused = {}
for env, sums in pairs(again) do reused[#reused + 1] = string.format('%s %.0f %.0f', env, sums[1], sums[2]) end
if #reused > 0 then
  header[#header + 1] = 'reused'
  header[#header + 1] = table.concat(reused, ' ')
end
redis.call('XADD', steps_key, number .. '-0', unpack(header))
for r = 1, #ARGV - 15 do redis.call('XADD', steps_key, number .. '-' .. r, 'part', ARGV[15 + r]) end
redis.call('XADD', history_key, 'MAXLEN', '~', history_kept, '*', 'record', history_line)
redis.call('XADD', summary_key, 'MAXLEN', '~', summary_kept, '*', 'record', summary_line)
redis.call('SET', state_key, new_state)
redis.call('HSET', meta_key, 'step', number, 'digest', digest)
redis.call('HDEL', meta_key, 'checkpoint_now')  -- this header has asked for it
-- The run can go back to the step before the oldest that is here. The summary has a line per step; ids of a stream never
-- fall either, and a step's is its tombstones' score, or above it by what this script takes: then a step less is kept.
local age, steps = string.match(tombstones, '^(%d+) (%d+)$')
local before = string.format('(%.0f', now - tonumber(age))
if steps ~= '0' and redis.call('ZCOUNT', closed_key, '-inf', before) > 0 then
  local oldest = tonumber(string.match(redis.call('XRANGE', steps_key, '-', '+', 'COUNT', 1)[1][1], '^%d+'))
  local count = tonumber(steps) + step - oldest
  local lines = redis.call('XREVRANGE', summary_key, '+', '-', 'COUNT', string.format('%.0f', count))
  if #lines == count then
    local then_at = tonumber(string.match(lines[count][1], '^%d+'))
    redis.call('ZREMRANGEBYSCORE', closed_key, '-inf', string.format('(%.0f', math.min(now - tonumber(age), then_at)))
  end
end
return {'OK', clock}
