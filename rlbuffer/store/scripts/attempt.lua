#!lua flags=allow-oom
-- ATTEMPT: one start of the trainer. Its number fences whatever an older trainer still says.
--
-- KEYS  1 trainer   2 meta   3 policy
-- ARGV  1 uuid of the attempt   2 world size   3 step that the trainer's state contains
-- Reply {'OK', number}        the same uuid again gives the same number
--       {'GONE'}              the run does not exist
--       {'AHEAD', step}       the trainer's state is ahead of the run's last step
--       {'RETIRED', retired}  the steps after the trainer's state are gone
-- The number is max(server ms, last + 1): it never goes back, over a loss of the newest writes too.
-- A policy version above the run's last step was made from steps that the server has lost: nobody will make it again,
-- and what it samples would be of the future for ever. It is taken back; the new trainer announces the one it has.
local meta = redis.call('HMGET', KEYS[2], 'epoch', 'step', 'retired')
if not meta[1] then return {'GONE'} end
local trainer = redis.call('HMGET', KEYS[1], 'number', 'uuid')
if trainer[2] == ARGV[1] then return {'OK', trainer[1]} end
local resume = tonumber(ARGV[3])
if resume > tonumber(meta[2] or '0') then return {'AHEAD', meta[2] or '0'} end
if resume < tonumber(meta[3] or '0') then return {'RETIRED', meta[3]} end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local number = string.format('%.0f', math.max(now, tonumber(trainer[1] or '0') + 1))
local current = redis.call('HGET', KEYS[3], '')
if current then
  local its_epoch, version = string.match(current, '^(%d+) (%d+) ')
  if its_epoch == meta[1] and tonumber(version) > tonumber(meta[2] or '0') then redis.call('HDEL', KEYS[3], '') end
end
redis.call('HSET', KEYS[1], 'number', number, 'uuid', ARGV[1], 'world_size', ARGV[2], 'resume', ARGV[3],
  'epoch', meta[1], 'seen', string.format('%.0f', now))
return {'OK', number}
