#!lua flags=allow-oom
-- LEASE: one leader per run, by the server's clock alone; and what only the leader may say about the run.
--
-- KEYS  1 lease   2 meta   3 allowance   4 pool   5 ends
-- ARGV  1 action, then
--       acquire  2 owner (unique per process start)   3 time to live, ms
--                -> {'ACQUIRED' | 'RENEWED' | 'HELD', token, owner, remaining ms}
--                   RENEWED: held by this owner without a break. HELD: by another, whose token this is.
--       release  2 owner                    -> {'OK'} | {'FENCED', owner}
--       config   2 token  3 config  4 digest  5 digest of the wanted config that this settles ('' for none)
--                -> {'OK', revision} | {'FENCED', owner}; the revision grows when the digest is new
--       refuse   2 token  3 digest of the wanted config  4 why -> {'OK'} | {'FENCED', owner}
--       error    2 token  3 message          -> {'OK'} | {'FENCED', owner}
--       end      2 token  3 last step, as the leader knows it; '' takes back that the run has ended
--                4... field, value of `ends` as the leader knows them
--                -> {'OK'} | {'OPEN'} something is pending, or the run is at another step, or somebody has let an env go
--                on or expects a worker since the leader looked | {'FENCED', owner}
--       finish   2 token  3 '<attempt> <step>' of the trainer that has made its last step: workers that hear of it leave;
--                '' takes it back     -> {'OK'} | {'FENCED', owner}
--       allow    2 token  3 count  4... env, tickets that may be out; replaces what was there, with nothing while the run
--                drains -> {'OK'} | {'FENCED', owner}
--                `count` grows with each that the leader sends: one that comes late changes nothing
--       every action but release -> {'GONE'} when the run does not exist: nothing may be left under its name
-- A lease that runs longer from now than it was given for (`ttl`) was given by a clock that has been set back since: it
-- counts as expired, or nobody could lead until the clock is there again.
-- The token is max(server ms, last + 1): it grows with every new holder, over a loss of the newest writes too.
local lease_key, meta_key, allowance_key, pool_key, ends_key = unpack(KEYS)
local action, who = unpack(ARGV, 1, 2)
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease = redis.call('HMGET', lease_key, 'owner', 'until', 'token', 'ttl')
local owner, expires_at, token = lease[1] or '', tonumber(lease[2] or '0'), lease[3] or '0'
if lease[4] and expires_at - now > tonumber(lease[4]) then expires_at = 0 end

if action ~= 'release' and redis.call('HEXISTS', meta_key, 'schema') == 0 then return {'GONE'} end

if action == 'acquire' then
  local ttl = ARGV[3]
  local till = now + tonumber(ttl)
  if expires_at >= now and owner ~= who then
    return {'HELD', token, owner, string.format('%.0f', expires_at - now)}
  end
  local status = 'RENEWED'
  if expires_at < now then
    status = 'ACQUIRED'
    token = string.format('%.0f', math.max(now, tonumber(token) + 1))
    redis.call('HDEL', lease_key, 'allow')
  end
  redis.call('HSET', lease_key, 'owner', who, 'until', string.format('%.0f', till), 'token', token,
    'ttl', ttl)
  return {status, token, who, ttl}
end

if action == 'release' then
  if owner ~= who then return {'FENCED', owner} end
  redis.call('HSET', lease_key, 'until', '0')
  return {'OK'}
end

if token ~= who or expires_at < now then return {'FENCED', owner} end
if action == 'config' then
  local config, digest, settled = ARGV[3], ARGV[4], ARGV[5]
  if settled ~= '' and redis.call('HGET', meta_key, 'wanted_digest') == settled then
    redis.call('HDEL', meta_key, 'wanted', 'wanted_digest', 'refused')
  end
  if redis.call('HGET', meta_key, 'config_digest') ~= digest then
    redis.call('HINCRBY', meta_key, 'revision', 1)
  end
  redis.call('HSET', meta_key, 'config', config, 'config_digest', digest)
  return {'OK', redis.call('HGET', meta_key, 'revision') or '0'}
elseif action == 'refuse' then
  local digest, why = ARGV[3], ARGV[4]
  if redis.call('HGET', meta_key, 'wanted_digest') == digest then
    redis.call('HDEL', meta_key, 'wanted', 'wanted_digest')
    redis.call('HSET', meta_key, 'refused', digest .. ' ' .. why)
  end
elseif action == 'error' then
  local message = ARGV[3]
  redis.call('HSET', meta_key, 'error', message)
elseif action == 'end' then
  local last_step = ARGV[3]
  local differs = redis.call('HLEN', ends_key) ~= (#ARGV - 3) / 2
  for i = 4, #ARGV, 2 do differs = differs or redis.call('HGET', ends_key, ARGV[i]) ~= ARGV[i + 1] end
  if last_step == '' then
    redis.call('HDEL', meta_key, 'ended')
  elseif differs or redis.call('XLEN', pool_key) > 0 or redis.call('HGET', meta_key, 'step') ~= last_step then
    return {'OPEN'}
  else
    redis.call('HSET', meta_key, 'ended', last_step)
  end
elseif action == 'finish' then
  local finished = ARGV[3]
  if finished == '' then
    redis.call('HDEL', meta_key, 'finished')
  else
    redis.call('HSET', meta_key, 'finished', finished)
  end
else
  local count = ARGV[3]
  if tonumber(count) < tonumber(redis.call('HGET', lease_key, 'allow') or '0') then return {'OK'} end
  redis.call('HSET', lease_key, 'allow', count)
  redis.call('DEL', allowance_key)
  if redis.call('HEXISTS', meta_key, 'draining') == 1 then return {'OK'} end
  for i = 4, #ARGV, 2 do redis.call('HSET', allowance_key, ARGV[i], ARGV[i + 1]) end
end
return {'OK'}
