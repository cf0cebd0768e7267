-- Sessions of one shard whose time has come, each with the score that it has from now on: they are put off, so that no
-- other replica looks at them meanwhile.
-- KEYS: the shard. ARGV: ttl_ms, how many at most, put off by this many ms. Answers session id, score, session id, ...
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local score = string.format('%.0f', now + tonumber(ARGV[3]))
local due = {}
for _, session_id in ipairs(redis.call('ZRANGE', KEYS[1], '-inf', now, 'BYSCORE', 'LIMIT', '0', ARGV[2])) do
  redis.call('ZADD', KEYS[1], score, session_id)
  due[#due + 1] = session_id
  due[#due + 1] = score
end
if #due > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return due
