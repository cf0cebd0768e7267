-- Puts sessions into one shard of the index of leases, to be looked at when their leases may be over.
-- KEYS: the shard. ARGV: ttl_ms, then pairs of session id and time from now in ms.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for first = 2, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[first + 1])), ARGV[first])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 'OK'
