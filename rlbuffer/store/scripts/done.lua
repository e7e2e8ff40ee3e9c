#!lua flags=allow-oom
-- DONE: how many tickets an env has in all, where somebody says so. TICKET gives no number beyond that, and the env is
-- done when all its numbers were given and none is out. TICKET keeps what workers know of their data; this script keeps
-- what a person or a producer says, which counts before it.
--
-- KEYS  1 ends (hash: env -> tickets that it has: '' no end, '<n>' as its workers say, '=<n>' as was said here;
--         '[worker.NAME]' -> '' for a worker that is to come)   2 numbers   3 meta
-- ARGV  1 action, then
--       done    2 epoch   3 env      no number is given beyond those that were
--               -> {'OK'}             changes nothing when it is said again
--                  {'GONE', epoch, line}  the run is in another epoch ('' when it does not exist), and its line of versions
--                                      began in the epoch `line`
--       resume  2 env                what was said of its end is forgotten: its workers say it anew -> {'OK'} | {'SAME'}
--       expect  2... worker sections that are about to start, each taken out by its first TICKET: until then the run is
--               not at its end -> {'OK'}
-- An action that lets a run go on takes back that it has ended.
local ends_key, numbers_key, meta_key = unpack(KEYS)
local action = ARGV[1]
if action == 'done' then
  local epoch, env = ARGV[2], ARGV[3]
  local meta = redis.call('HMGET', meta_key, 'epoch', 'line', 'since')
  if meta[1] ~= epoch then return {'GONE', meta[1] or '', meta[2] or meta[3] or meta[1] or ''} end
  local ending = redis.call('HGET', ends_key, env) or ''
  if string.sub(ending, 1, 1) ~= '=' then
    redis.call('HSET', ends_key, env, '=' .. (redis.call('HGET', numbers_key, env) or '0'))
  end
  return {'OK'}
end

if action == 'resume' then
  local env = ARGV[2]
  if redis.call('HDEL', ends_key, env) == 0 then return {'SAME'} end
else
  local fields = redis.call('HKEYS', ends_key)
  for i = 1, #fields do
    if string.sub(fields[i], 1, 1) == '[' then redis.call('HDEL', ends_key, fields[i]) end
  end
  for i = 2, #ARGV do redis.call('HSET', ends_key, '[worker.' .. ARGV[i] .. ']', '') end
end
redis.call('HDEL', meta_key, 'ended')
return {'OK'}
