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
local trainer_key, meta_key, policy_key = unpack(KEYS)
local attempt, adapter, new_version, new_record, weightless = unpack(ARGV, 1, 5)
local number = redis.call('HGET', trainer_key, 'number')
if number ~= attempt then return {'FENCED', number or '0'} end
local epoch = redis.call('HGET', meta_key, 'epoch') or '0'
local current = redis.call('HGET', policy_key, adapter)
if current then
  local current_epoch, version, record = string.match(current, '^(%d+) (%d+) (.*)$')
  local gains_weights = version == new_version and record == weightless and new_record ~= record
  if current_epoch == epoch and tonumber(version) >= tonumber(new_version) and not gains_weights then return {'OLD', version} end
end
redis.call('HSET', policy_key, adapter, epoch .. ' ' .. new_version .. ' ' .. new_record)
return {'OK'}
