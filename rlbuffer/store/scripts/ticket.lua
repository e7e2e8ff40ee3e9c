#!lua
-- TICKET: leave to sample. A ticket is a number n of an env: the group id is <env>.<n>, the prompt the n-th of the env.
-- Refused at the memory limit (no allow-oom): no new groups are wanted then. Those that are out are kept by KEEP.
--
-- KEYS  1 tickets of the env (zset: number -> expiry, server ms)   2 allowance (hash: env -> how many, '*' for others)   3 numbers (hash)
--       4 ends (hash: see DONE)   5 meta   6 policy (hash: see ANNOUNCE)
--       7 taken (hash: number -> '<version> <server ms>': what was announced of all weights when it was taken last, and when)
-- ARGV  1 'take'   2 env   3 how many at most   4 time to live, ms
--       5 how many tickets the env has in all, as the worker knows it; '' no end   6 the worker's section; '' for none
--       7 longest time to live, ms: what would be out for longer was given by a clock that has been set back since. It
--         lives from now on as this worker's do, time enough for whoever holds it to renew it
--       8 how many more this worker must have out to get on, whatever others have: they are given unless the allowance is 0
--       9 what meta said of the trainer's end (see LEASE, finish) when the worker began: one that begins behind an end
--         waits for the next trainer
-- Reply the numbers: the lowest expired ones first, then new ones, while fewer than the allowance are out. When many
-- workers have died at once, it is the lowest of the 256 that expired first: looking at 10,000 takes 15 ms. None is new
-- when what stands for the next number is no number.
--       {'DONE'} when the env has an end, all its numbers were given, and none is out
--       {'OVER', '<attempt> <step>'} when the trainer has made its last step since the worker began
-- Of two workers that name different ends the larger one counts, so that none stops the other early.
local tickets_key, allowance_key, numbers_key, ends_key, meta_key, policy_key, taken_key = unpack(KEYS)
local _, env, most, ttl, size, section, longest, least, earlier_end = unpack(ARGV, 1, 9)
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local now = now_ms()
local wanted = tonumber(most)
local expiry = string.format('%.0f', now + tonumber(ttl))
local clock = string.format('%.0f', now)
local ending = redis.call('HGET', ends_key, env)
if not ending or (size ~= '' and (ending == '' or (tonumber(ending) or math.huge) < tonumber(size))) then
  ending = size
  redis.call('HSET', ends_key, env, ending)
end
if section ~= '' then redis.call('HDEL', ends_key, '[worker.' .. section .. ']') end
local finished = redis.call('HGET', meta_key, 'finished')
if finished and finished ~= earlier_end then return {'OVER', finished} end
local left = math.huge
if ending ~= '' then
  left = (tonumber(string.match(ending, '^=?(%d+)$')) or 0) - (tonumber(redis.call('HGET', numbers_key, env) or '0') or 0)
  if left <= 0 and redis.call('ZCARD', tickets_key) == 0 then return {'DONE'} end
end
local beyond = string.format('(%.0f', now + tonumber(longest))
for _, ticket in ipairs(redis.call('ZRANGEBYSCORE', tickets_key, beyond, '+inf', 'LIMIT', 0, 256)) do
  redis.call('ZADD', tickets_key, expiry, ticket)
end
local out = redis.call('ZCOUNT', tickets_key, '(' .. clock, '+inf')
-- '*' stands for envs that the leader does not know yet: without it a new env could never send its first group.
local allowance = redis.call('HGET', allowance_key, env) or redis.call('HGET', allowance_key, '*') or '0'
local free = tonumber(allowance) - out
if tonumber(allowance) > 0 then free = math.max(free, tonumber(least or '0')) end
free = math.min(wanted, free)
local taken = {}
if free <= 0 then return taken end

local expired = redis.call('ZRANGEBYSCORE', tickets_key, '-inf', clock, 'LIMIT', 0, math.max(256, free))
-- Workers write here: what is no number is no ticket.
local numbers = {}
for i = 1, #expired do
  if string.match(expired[i], '^%d+$') and #expired[i] <= 15 then
    numbers[#numbers + 1] = tonumber(expired[i])
  else
    redis.call('ZREM', tickets_key, expired[i])
  end
end
table.sort(numbers)
for i = 1, math.min(free, #numbers) do taken[i] = numbers[i] end
local new = math.min(free - #taken, left)
local next_one = redis.call('HGET', numbers_key, env) or '0'
if new > 0 and string.match(next_one, '^%d+$') and #next_one <= 14 then
  local after = redis.call('HINCRBY', numbers_key, env, new)
  for i = after - new, after - 1 do taken[#taken + 1] = i end
end
local version = string.match(redis.call('HGET', policy_key, '') or '', '^%d+ (%d+) ') or '-1'
for i = 1, #taken do
  local number = string.format('%.0f', taken[i])
  redis.call('ZADD', tickets_key, expiry, number)
  redis.call('HSET', taken_key, number, version .. ' ' .. clock)
end
return taken
