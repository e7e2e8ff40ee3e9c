#!lua flags=allow-oom
-- REPORT: acknowledgement, checkpoint notice and heartbeat of the trainer in one. Nothing in it ever goes back.
--
-- KEYS  1 trainer   2 meta   3 steps   4 ledger   5 policy   6 unused   7 history
-- ARGV  1 attempt number   2 epoch   3 last trained step   4 its digest ('' when unknown)   5 oldest kept checkpoint
--       6 claim: what the trainer hands back to a server that has lost steps which it has trained ('' at first)
--       7 newest checkpoint of this attempt ('0' when unknown)
--       8 newest version that earlier attempts have made (see ATTEMPT)   9 which server this is
--       10 step in hand: '<step> <digest>' of what its loop was given last, '<step> ' when it has let go of it, '' for none
--       11 '1': the loop will be given it if it is here, and else it has nothing in hand
--       12 of a stream, a line for each step up to 3 of which something was given and not trained: step, env, rollouts,
--         tokens, which ones, and its history record (the last two in hex)
--       13 '1': the trainer has made its last step, so the run has ended (field `finished`: the attempt that said so)
--       14 history entries kept
-- Reply {'OK', trained, '1'}   '0': the step in hand is not trained yet, and is not here
--       {'FENCED', number}   a newer attempt is registered, this one
--       {'EPOCH', epoch, since}  the run is in another epoch, which goes on from the epoch `since`; or it is from now
--                            on, in a new line of versions: this attempt trains steps of an earlier one again, and the
--                            server has lost some of them, or may have
--       {'AHEAD', step}      the trainer has trained a step that the run does not have; its last is this
--       {'DIGEST', digest}   the trainer's step is not the one committed here, which has this digest
--                            After these two the claim, if there is one, is kept for RECOVER.
--       {'MISSING', step}    a header that must still be here is not
-- `at` is this attempt's own place: below `trained` while it trains steps of an earlier attempt again.
-- Each step in (trained before, trained now] moves its totals from packed to trained, once; what was not trained of it
-- is dropped as unused, and `unused` keeps it under the step's number until that retires.
local trainer_key, meta_key, steps_key, ledger_key, policy_key, unused_key, history_key = unpack(KEYS)
local attempt, trainer_epoch, acknowledged_step, acknowledged_digest, oldest_kept, claim, checkpoint, newest_version,
  server, hand, takes, unused_lines, finished, history_kept = unpack(ARGV, 1, 14)
local trainer = redis.call('HMGET', trainer_key, 'number', 'trained', 'oldest_kept', 'digest', 'server')
if trainer[1] ~= attempt then return {'FENCED', trainer[1] or '0'} end
local meta = redis.call('HMGET', meta_key, 'epoch', 'step', 'since', 'retired')
if meta[1] ~= trainer_epoch then return {'EPOCH', meta[1] or '', meta[3] or meta[1] or ''} end
local time = redis.call('TIME')
local clock = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local function hand_back(reply)
  if takes == '1' then hand = '' end
  if claim ~= '' then redis.call('HSET', trainer_key, 'claim', claim, 'seen', clock, 'hand', hand) end
  return reply
end
local before, trained = tonumber(trainer[2] or '0'), tonumber(acknowledged_step)
local last, newest = tonumber(meta[2] or '0'), tonumber(newest_version)
if newest > trained and (newest > last or (trainer[5] and trainer[5] ~= server)) then
  local epoch = string.format('%.0f', tonumber(meta[1]) + 1)
  redis.call('HSET', meta_key, 'epoch', epoch, 'line', epoch)
  redis.call('HSET', trainer_key, 'epoch', epoch, 'server', server)
  local policies = redis.call('HGETALL', policy_key)
  for i = 1, #policies, 2 do
    local version = string.match(policies[i + 1], '^%d+ (%d+) ')
    if policies[i] ~= '' or tonumber(version) > math.min(last, trained) then redis.call('HDEL', policy_key, policies[i]) end
  end
  return {'EPOCH', epoch, meta[3] or meta[1]}
end
if trained > tonumber(meta[2] or '0') then return hand_back({'AHEAD', meta[2] or '0'}) end

local function fields_of(step)
  local id = string.format('%.0f-0', step)
  local found = redis.call('XRANGE', steps_key, id, id)
  if #found == 0 then return nil end
  local fields, header = found[1][2], {}
  for k = 1, #fields, 2 do header[fields[k]] = fields[k + 1] end
  return header
end

local moves = {}
for step = before + 1, trained do
  local header = fields_of(step)
  if not header then return {'MISSING', string.format('%.0f', step)} end
  if step == trained and acknowledged_digest ~= '' and header.digest ~= acknowledged_digest then
    return hand_back({'DIGEST', header.digest})
  end
  header.number = string.format('%.0f', step)
  moves[#moves + 1] = header
end
if trained <= before and acknowledged_digest ~= '' then
  local header = fields_of(trained)
  local digest = header and header.digest or (trained == before and trainer[4] or '')
  if digest ~= '' and digest ~= acknowledged_digest then return hand_back({'DIGEST', digest}) end
end

local unused, records = {}, {}
for step, left, record in string.gmatch(unused_lines or '', '(%d+) ([^\n]*) (%x+)\n') do
  unused[step] = left
  records[step] = string.gsub(record, '%x%x', function(digits) return string.char(tonumber(digits, 16)) end)
end
for i = 1, #moves do
  local left_out = unused[moves[i].number]
  local unused_env, unused_rollouts, unused_tokens = string.match(left_out or '', '^(%S+) (%d+) (%d+) ')
  if left_out then
    redis.pcall('HSET', unused_key, moves[i].number, left_out)
    redis.pcall('XADD', history_key, 'MAXLEN', '~', history_kept, '*', 'record', records[moves[i].number])
  end
  for env, rollouts, tokens, groups in string.gmatch(moves[i].packed, '(%S+) (%d+) (%d+) (%d+)') do
    local is_unused = env == unused_env and unused_rollouts == rollouts
    local left = env == unused_env and
      {rollouts = unused_rollouts, tokens = unused_tokens, groups = is_unused and groups or '0'} or {}
    for unit, amount in pairs({rollouts = rollouts, tokens = tokens, groups = groups}) do
      local trains = string.format('%.0f', tonumber(amount) - tonumber(left[unit] or '0'))
      redis.pcall('HINCRBY', ledger_key, env .. ':packed:' .. unit, '-' .. amount)
      if trains ~= '0' or not left[unit] then redis.pcall('HINCRBY', ledger_key, env .. ':trained:' .. unit, trains) end
      if left[unit] and left[unit] ~= '0' then
        redis.pcall('HINCRBY', ledger_key, env .. ':dropped:unused:' .. unit, left[unit])
      end
    end
  end
end
-- What an attempt below the retired steps hands back (see ATTEMPT) stays until RECOVER: nothing but that lets it go on.
if trained >= tonumber(meta[4] or '0') then redis.call('HDEL', trainer_key, 'claim') end
if checkpoint ~= '0' then redis.call('HSET', trainer_key, 'checkpoint', checkpoint) end
local hand_step, hand_digest = string.match(hand, '^(%d+) (%S+)$')
local is_here = '1'
if hand_step and tonumber(hand_step) > trained then
  local header = fields_of(tonumber(hand_step))
  if not header or header.digest ~= hand_digest then is_here = '0' end
end
if takes == '1' and is_here == '0' then hand = '' end
redis.call('HSET', trainer_key, 'seen', clock, 'at', acknowledged_step, 'server', server, 'hand', hand,
  'oldest_kept', string.format('%.0f', math.max(tonumber(trainer[3] or '0'), tonumber(oldest_kept))))
if trained > before then
  redis.call('HSET', trainer_key, 'trained', acknowledged_step, 'digest', acknowledged_digest)
end
if finished == '1' then redis.call('HSET', trainer_key, 'finished', attempt) end
return {'OK', string.format('%.0f', math.max(before, trained)), is_here}
