#!lua
-- PUSH, phase 2: the group whose payload was stored by phase 1 becomes pending. Exactly once per producer sequence.
-- Refused at the memory limit (no allow-oom): a worker can wait.
--
-- KEYS  1 meta  2 pool  3 producer  4 ledger
-- ARGV  1 epoch that the producer works in   2 its sequence, from 1   3 how long the producer is remembered, ms
--       4 env   5 group id   6 payload suffix   7 rollouts   8 tokens   9 metadata
-- Reply {'OK', entry id}
--       {'DUP', entry id}   sequence known already; the id is '' unless it was the producer's last
--       {'GAP', last}       pushes between `last` and this one are missing here
--       {'GONE', epoch, since}  the run is in another epoch ('' when it does not exist), which goes on from `since`
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch ~= ARGV[1] then return {'GONE', epoch or '', redis.call('HGET', KEYS[1], 'since') or epoch or ''} end

local known = redis.call('HMGET', KEYS[3], 'sequence', 'id')
local last = tonumber(known[1] or '0')
local sequence = tonumber(ARGV[2])
if sequence == last then return {'DUP', known[2]} end
if sequence < last then return {'DUP', ''} end
if sequence > last + 1 then return {'GAP', string.format('%.0f', last)} end

local id = redis.call('XADD', KEYS[2], '*', 'env', ARGV[4], 'group', ARGV[5], 'key', ARGV[6],
  'rollouts', ARGV[7], 'tokens', ARGV[8], 'metadata', ARGV[9])
redis.call('HSET', KEYS[3], 'sequence', ARGV[2], 'id', id)
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('HINCRBY', KEYS[4], ARGV[4] .. ':pushed:rollouts', ARGV[7])
redis.call('HINCRBY', KEYS[4], ARGV[4] .. ':pushed:tokens', ARGV[8])
return {'OK', id}
