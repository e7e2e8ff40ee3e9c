#!lua flags=allow-oom
-- LEASE: one leader per run, by the server's clock alone; and what only the leader may say about the run.
--
-- KEYS  1 lease   2 meta   3 allowance   4 pool   5 ends
-- ARGV  1 action, then
--       acquire  2 owner (unique per process start)   3 time to live, ms
--                -> {'ACQUIRED' | 'RENEWED' | 'HELD', token, owner, remaining ms}
--                   RENEWED: held by this owner without a lapse. HELD: by another, whose token this is.
--       release  2 owner                    -> {'OK'} | {'FENCED', owner}
--       config   2 token  3 config  4 digest  5 digest of the wanted config that this settles ('' for none)
--                -> {'OK', revision} | {'FENCED', owner}; the revision grows when the digest is new
--       refuse   2 token  3 digest of the wanted config  4 why -> {'OK'} | {'FENCED', owner}
--       error    2 token  3 message          -> {'OK'} | {'FENCED', owner}
--       end      2 token  3 last step, as the leader knows it; '' takes back that the run has ended
--                4... field, value of `ends` as the leader knows them
--                -> {'OK'} | {'OPEN'} something is pending, or the run is at another step, or somebody has let an env go
--                on or expects a worker since the leader looked | {'FENCED', owner}
--       allow    2 token  3... env, tickets that may be out; replaces what was there, with nothing while the run
--                drains -> {'OK'} | {'FENCED', owner}
--       every action but release -> {'GONE'} when the run does not exist: nothing may be left under its name
-- A lease that runs longer from now than it was given for (`ttl`) was given by a clock that has been set back since: it
-- counts as lapsed, or nobody could lead until the clock is there again.
-- The token is max(server ms, last + 1): it grows with every new holder, over a loss of the newest writes too.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease = redis.call('HMGET', KEYS[1], 'owner', 'until', 'token', 'ttl')
local owner, lapse, token = lease[1] or '', tonumber(lease[2] or '0'), lease[3] or '0'
if lease[4] and lapse - now > tonumber(lease[4]) then lapse = 0 end
local action = ARGV[1]

if action ~= 'release' and redis.call('HEXISTS', KEYS[2], 'schema') == 0 then return {'GONE'} end

if action == 'acquire' then
  local till = now + tonumber(ARGV[3])
  if lapse >= now and owner ~= ARGV[2] then
    return {'HELD', token, owner, string.format('%.0f', lapse - now)}
  end
  local status = 'RENEWED'
  if lapse < now then
    status = 'ACQUIRED'
    token = string.format('%.0f', math.max(now, tonumber(token) + 1))
  end
  redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'until', string.format('%.0f', till), 'token', token,
    'ttl', ARGV[3])
  return {status, token, ARGV[2], ARGV[3]}
end

if action == 'release' then
  if owner ~= ARGV[2] then return {'FENCED', owner} end
  redis.call('HSET', KEYS[1], 'until', '0')
  return {'OK'}
end

if token ~= ARGV[2] or lapse < now then return {'FENCED', owner} end
if action == 'config' then
  if ARGV[5] ~= '' and redis.call('HGET', KEYS[2], 'wanted_digest') == ARGV[5] then
    redis.call('HDEL', KEYS[2], 'wanted', 'wanted_digest', 'refused')
  end
  if redis.call('HGET', KEYS[2], 'config_digest') ~= ARGV[4] then
    redis.call('HINCRBY', KEYS[2], 'revision', 1)
  end
  redis.call('HSET', KEYS[2], 'config', ARGV[3], 'config_digest', ARGV[4])
  return {'OK', redis.call('HGET', KEYS[2], 'revision') or '0'}
elseif action == 'refuse' then
  if redis.call('HGET', KEYS[2], 'wanted_digest') == ARGV[3] then
    redis.call('HDEL', KEYS[2], 'wanted', 'wanted_digest')
    redis.call('HSET', KEYS[2], 'refused', ARGV[3] .. ' ' .. ARGV[4])
  end
elseif action == 'error' then
  redis.call('HSET', KEYS[2], 'error', ARGV[3])
elseif action == 'end' then
  local differs = redis.call('HLEN', KEYS[5]) ~= (#ARGV - 3) / 2
  for i = 4, #ARGV, 2 do differs = differs or redis.call('HGET', KEYS[5], ARGV[i]) ~= ARGV[i + 1] end
  if ARGV[3] == '' then
    redis.call('HDEL', KEYS[2], 'ended')
  elseif differs or redis.call('XLEN', KEYS[4]) > 0 or redis.call('HGET', KEYS[2], 'step') ~= ARGV[3] then
    return {'OPEN'}
  else
    redis.call('HSET', KEYS[2], 'ended', ARGV[3])
  end
else
  redis.call('DEL', KEYS[3])
  if redis.call('HEXISTS', KEYS[2], 'draining') == 1 then return {'OK'} end
  for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
end
return {'OK'}
