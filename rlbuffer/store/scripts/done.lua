#!lua flags=allow-oom
-- DONE: how many tickets an env has in all, where somebody says so. TICKET gives no number beyond that, and the env is
-- done when all its numbers were given and none is out. TICKET keeps what workers know of their data; this script keeps
-- what a person or a producer says, which counts before it.
--
-- KEYS  1 ends (hash: env -> tickets that it has: '' no end, '<n>' as its workers say, '=<n>' as was said here;
--         '[worker.NAME]' -> '' for a worker that is to come)   2 numbers   3 meta
-- ARGV  1 action, then
--       done    2 epoch   3 env      no number is given beyond those that were
--               -> {'OK', tickets}  as before when it is said again
--                  {'GONE', epoch, line}  the run is in another epoch ('' when it does not exist), and its line of versions
--                                      began in the epoch `line`
--       resume  2 env                what was said of its end is forgotten: its workers say it anew -> {'OK'} | {'SAME'}
--       expect  2... worker sections that are about to start, each taken out by its first TICKET: until then the run is
--               not at its end -> {'OK'}
-- An action that lets a run go on takes back that it has ended.
local action = ARGV[1]
if action == 'done' then
  local meta = redis.call('HMGET', KEYS[3], 'epoch', 'line', 'since')
  if meta[1] ~= ARGV[2] then return {'GONE', meta[1] or '', meta[2] or meta[3] or meta[1] or ''} end
  local known = redis.call('HGET', KEYS[1], ARGV[3]) or ''
  if string.sub(known, 1, 1) ~= '=' then
    known = '=' .. (redis.call('HGET', KEYS[2], ARGV[3]) or '0')
    redis.call('HSET', KEYS[1], ARGV[3], known)
  end
  return {'OK', string.sub(known, 2)}
end

if action == 'resume' then
  if redis.call('HDEL', KEYS[1], ARGV[2]) == 0 then return {'SAME'} end
else
  local fields = redis.call('HKEYS', KEYS[1])
  for i = 1, #fields do
    if string.sub(fields[i], 1, 1) == '[' then redis.call('HDEL', KEYS[1], fields[i]) end
  end
  for i = 2, #ARGV do redis.call('HSET', KEYS[1], '[worker.' .. ARGV[i] .. ']', '') end
end
redis.call('HDEL', KEYS[3], 'ended')
return {'OK'}
