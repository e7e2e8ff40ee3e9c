#!lua flags=allow-oom
-- COMMIT: a planned step becomes immutable, and everything that it consumes leaves the pool, in one move.
--
-- KEYS  1 lease   2 pool   3 steps   4 meta   5 ledger   6 closed   7 garbage   8 history   9 summary   10 state
-- ARGV  1 token   2 epoch   3 step   4 digest of the step before ('' for step 1)   5 digest of this step
--       6 payload key prefix   7 age at which tombstones go, ms   8 history entries kept   9 summary lines kept
--       10 header   11 the batcher's state   12 summary line   13 history record
--       14 parts P, then P parts in the order of ranks
--       then entries E, then E of: id, packed rollouts, packed tokens, reasons D, D of (reason, rollouts, tokens)
--       then groups G, then G of: group id, env
-- Reply {'OK', committed at, server ms}
--       {'DUP'}                this very step is committed already
--       {'FENCED', owner}      the token is not the current one, or the lease has lapsed
--       {'ORDER', epoch, step} the run is not at the epoch, step and digest that this one follows
--       {'GONE', id...}        these entries are not pending any more
--       {'TWICE', id}          an entry is named twice
--       {'UNEQUAL', id, rollouts, tokens}  packed and dropped do not add up to what the entry holds, which is this
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local clock = string.format('%.0f', now)
local lease = redis.call('HMGET', KEYS[1], 'owner', 'until', 'token')
if lease[3] ~= ARGV[1] or tonumber(lease[2] or '0') < now then return {'FENCED', lease[1] or ''} end

local meta = redis.call('HMGET', KEYS[4], 'epoch', 'step', 'digest')
local last, step = tonumber(meta[2] or '0'), tonumber(ARGV[3])
if meta[1] == ARGV[2] and step == last and meta[3] == ARGV[5] then return {'DUP'} end
if meta[1] ~= ARGV[2] or step ~= last + 1 or (meta[3] or '') ~= ARGV[4] then
  return {'ORDER', meta[1] or '', string.format('%.0f', last)}
end

local parts = tonumber(ARGV[14])
local p = 15 + parts
local entries, seen, gone = {}, {}, {}
local count = tonumber(ARGV[p])
p = p + 1
for _ = 1, count do
  local id, reasons = ARGV[p], tonumber(ARGV[p + 3])
  if seen[id] then return {'TWICE', id} end
  seen[id] = true
  local use = {id = id, packed_rollouts = tonumber(ARGV[p + 1]), packed_tokens = tonumber(ARGV[p + 2]), dropped = {}}
  local rollouts, tokens = use.packed_rollouts, use.packed_tokens
  p = p + 4
  for _ = 1, reasons do
    use.dropped[#use.dropped + 1] = {ARGV[p], ARGV[p + 1], ARGV[p + 2]}
    rollouts, tokens = rollouts + tonumber(ARGV[p + 1]), tokens + tonumber(ARGV[p + 2])
    p = p + 3
  end
  local found = redis.call('XRANGE', KEYS[2], id, id)
  if #found == 0 then
    gone[#gone + 1] = id
  else
    local fields, entry = found[1][2], {}
    for k = 1, #fields, 2 do entry[fields[k]] = fields[k + 1] end
    if tonumber(entry.rollouts) ~= rollouts or tonumber(entry.tokens) ~= tokens then
      return {'UNEQUAL', id, entry.rollouts, entry.tokens}
    end
    use.env = entry.env
    use.key = ARGV[6] .. entry.group .. ':' .. entry.key
    entries[#entries + 1] = use
  end
end
if #gone > 0 then
  table.insert(gone, 1, 'GONE')
  return gone
end

-- From here on only writes. XDEL goes first: it frees memory before anything is added.
for i = 1, #entries do redis.call('XDEL', KEYS[2], entries[i].id) end

local order, packed = {}, {}
local function account(env)
  if not packed[env] then
    packed[env] = {0, 0, 0}
    order[#order + 1] = env
  end
  return packed[env]
end
for i = 1, #entries do
  local use = entries[i]
  local sums = account(use.env)
  sums[1], sums[2] = sums[1] + use.packed_rollouts, sums[2] + use.packed_tokens
  for k = 1, #use.dropped do
    local fate = use.env .. ':dropped:' .. use.dropped[k][1]
    redis.call('HINCRBY', KEYS[5], fate .. ':rollouts', use.dropped[k][2])
    redis.call('HINCRBY', KEYS[5], fate .. ':tokens', use.dropped[k][3])
  end
  redis.call('ZADD', KEYS[7], ARGV[3], use.key)
end
local groups = tonumber(ARGV[p])
for i = p + 1, p + 2 * groups, 2 do
  redis.call('ZADD', KEYS[6], clock, ARGV[i])
  local sums = account(ARGV[i + 1])
  sums[3] = sums[3] + 1
end
-- The totals stand beside the header in plain text, so that REPORT and VOID move them without reading the header.
local totals = {}
for i = 1, #order do
  local env, sums = order[i], packed[order[i]]
  redis.call('HINCRBY', KEYS[5], env .. ':packed:rollouts', string.format('%.0f', sums[1]))
  redis.call('HINCRBY', KEYS[5], env .. ':packed:tokens', string.format('%.0f', sums[2]))
  redis.call('HINCRBY', KEYS[5], env .. ':packed:groups', string.format('%.0f', sums[3]))
  totals[i] = string.format('%s %.0f %.0f %.0f', env, sums[1], sums[2], sums[3])
end
redis.call('XADD', KEYS[3], ARGV[3] .. '-0', 'header', ARGV[10], 'digest', ARGV[5], 'at', clock,
  'packed', table.concat(totals, ' '))
for r = 1, parts do redis.call('XADD', KEYS[3], ARGV[3] .. '-' .. r, 'part', ARGV[14 + r]) end
redis.call('XADD', KEYS[8], 'MAXLEN', '~', ARGV[8], '*', 'record', ARGV[13])
redis.call('XADD', KEYS[9], 'MAXLEN', '~', ARGV[9], '*', 'record', ARGV[12])
redis.call('SET', KEYS[10], ARGV[11])
redis.call('HSET', KEYS[4], 'step', ARGV[3], 'digest', ARGV[5])
redis.call('HDEL', KEYS[4], 'checkpoint_now')  -- this header has asked for it
redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', string.format('%.0f', now - tonumber(ARGV[7])))
return {'OK', clock}
