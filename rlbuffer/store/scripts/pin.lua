#!lua flags=allow-oom,allow-cross-slot-keys
-- PIN: the sizes of the payloads that a step is about to use, of many pushes in one call; what they should be the leader
-- knows. Payload keys are not declared, because they lie in other slots of a (one-shard) cluster.
--
-- KEYS  none
-- ARGV  pushes, each of: payload key, the fields of it that are asked for ("0 1 2")
-- Reply {size...} of all fields in this order; 0 for one that is missing, an error where the key is no hash
local sizes, count = {}, 0
for i = 1, #ARGV, 2 do
  local key = ARGV[i]
  for field in string.gmatch(ARGV[i + 1], '%d+') do
    count = count + 1
    sizes[count] = redis.pcall('HSTRLEN', key, field)
  end
end
return sizes
