#!lua flags=allow-oom
-- ANNOUNCE: a policy version that workers may sample from. It only grows inside an epoch, so a replaying trainer does
-- not announce again. Weights may come later: a version that was announced without any is announced again with them.
--
-- KEYS  1 trainer   2 meta   3 policy
-- ARGV  1 attempt number   2 adapter   3 version   4 record: location, size and checksum, msgpack
--       5 the record of a version without weights
-- Reply {'OK'}
--       {'OLD', version}    this or a newer version is announced already
--       {'FENCED', number}  a newer attempt is registered, this one
-- A field of `policy` is an adapter; its value is "<epoch> <version> <record>".
local number = redis.call('HGET', KEYS[1], 'number')
if number ~= ARGV[1] then return {'FENCED', number or '0'} end
local epoch = redis.call('HGET', KEYS[2], 'epoch') or '0'
local current = redis.call('HGET', KEYS[3], ARGV[2])
if current then
  local its_epoch, version, record = string.match(current, '^(%d+) (%d+) (.*)$')
  local gains_weights = version == ARGV[3] and record == ARGV[5] and ARGV[4] ~= record
  if its_epoch == epoch and tonumber(version) >= tonumber(ARGV[3]) and not gains_weights then return {'OLD', version} end
end
redis.call('HSET', KEYS[3], ARGV[2], epoch .. ' ' .. ARGV[3] .. ' ' .. ARGV[4])
return {'OK'}
