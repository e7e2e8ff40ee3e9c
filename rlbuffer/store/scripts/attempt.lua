#!lua flags=allow-oom
-- ATTEMPT: one start of the trainer. Its number fences whatever an older trainer still says.
--
-- KEYS  1 trainer   2 meta   3 policy
--       4 steps   5 history
-- ARGV  1 uuid of the attempt   2 world size   3 step that the trainer's state contains
--       4 newest epoch that it knows   5 digest of that step   6 claim (see REPORT); all three '' when unknown
--       7 which server this is ('' when unknown): another one after a restart or a failover
--       8 '1': versions count what the trainer announces, as those of a stream do, and none is made again
--       9 history record of its start ('' for none)   10 history entries kept
-- Reply {'OK', number, newest, epoch}  the same uuid again gives the same number; the claim is kept when the trainer is
--                             ahead. `newest`: no attempt has made a version above this one in this line
--       {'GONE'}              the run does not exist
--       {'AHEAD', step}       the trainer's state is ahead of the run's last step, and hands nothing back that fits
--       {'DIGEST', digest}    the run has another step there, and nothing that fits is handed back
--       {'RETIRED', retired}  the steps after the trainer's state are gone
-- The number is max(server ms, last + 1): it never goes back, over a loss of the newest writes too.
-- A new line of versions begins (docs/explain/protocol.md, Lines) when the trainer hands something back, when the server is
-- another one than its trainer last spoke to, or when a version above the run's last step is announced, which was made
-- from steps that the server has lost: there may be versions out there that this attempt will make again otherwise. What
-- is announced and may be given up is taken back; the new trainer announces what it has.
local trainer_key, meta_key, policy_key, steps_key, history_key = unpack(KEYS)
local uuid, world_size, resume_step, trainer_epoch, trainer_digest, claim, server, announces, record, history_kept =
  unpack(ARGV, 1, 10)
local meta = redis.call('HMGET', meta_key, 'epoch', 'step', 'retired', 'digest', 'since',
  'recovered')
if not meta[1] then return {'GONE'} end
local trainer = redis.call('HMGET', trainer_key, 'number', 'uuid', 'server', 'newest', 'epoch')
if trainer[1] and trainer[2] == uuid and trainer[5] then return {'OK', trainer[1], trainer[4] or '0', trainer[5]} end
local resume, step = tonumber(resume_step), tonumber(meta[2] or '0')
local refusal
if resume > step then
  refusal = {'AHEAD', meta[2] or '0'}
elseif trainer_digest ~= '' and resume > 0 then
  local digest = resume == step and meta[4] or ''
  local found = redis.call('XRANGE', steps_key, resume_step .. '-0', resume_step .. '-0')
  if #found == 1 then
    for k = 1, #found[1][2], 2 do
      if found[1][2][k] == 'digest' then digest = found[1][2][k + 1] end
    end
  end
  if digest ~= '' and digest ~= trainer_digest then refusal = {'DIGEST', digest} end
end
-- Handed back is only what belongs to this run: its epochs go on from `since`. A recovery may have been lost, too, so
-- the trainer can know an epoch or a few more; that of another run under this name lies further away.
local newest_epoch = tonumber(trainer_epoch) or 0
local fits = claim ~= '' and newest_epoch >= tonumber(meta[5] or meta[1]) and newest_epoch <= tonumber(meta[1]) + 100
if refusal and not fits then return refusal end
if not refusal and resume < tonumber(meta[3] or '0') then
  -- A recovery has raised the floor, and the trainer ended before it wrote the checkpoint that it was asked for. Steps
  -- after its older one cannot be had any more, so the run goes back to it; a trainer without any begins anew.
  local is_recovered = meta[6] == meta[3] and claim ~= '' and (fits or resume == 0)
  if not is_recovered then return {'RETIRED', meta[3]} end
  refusal = {'RETIRED', meta[3]}
end
local newest = refusal and resume or step

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local number = string.format('%.0f', math.max(now, tonumber(trainer[1] or '0') + 1))
local epoch = meta[1]
local current = redis.call('HGET', policy_key, '')
local is_above = announces ~= '1' and current and tonumber(string.match(current, '^%d+ (%d+) ')) > newest
if refusal or is_above or (trainer[3] and trainer[3] ~= server) then
  epoch = string.format('%.0f', tonumber(epoch) + 1)
  redis.call('HSET', meta_key, 'epoch', epoch, 'line', epoch)
  -- Adapters count steps of their own: which of those are here is not known.
  redis.call('DEL', policy_key)
  if current and not (refusal or is_above) then redis.call('HSET', policy_key, '', current) end
end
redis.call('HSET', trainer_key, 'number', number, 'uuid', uuid, 'world_size', world_size, 'resume', resume_step,
  'epoch', epoch, 'server', server, 'newest', string.format('%.0f', newest), 'seen', string.format('%.0f', now), 'at', resume_step, 'checkpoint', resume_step)
redis.call('HDEL', trainer_key, 'hand')
if record ~= '' then redis.pcall('XADD', history_key, 'MAXLEN', '~', history_kept, '*', 'record', record) end
if refusal then redis.call('HSET', trainer_key, 'claim', claim) else redis.call('HDEL', trainer_key, 'claim') end
return {'OK', number, string.format('%.0f', newest), epoch}
