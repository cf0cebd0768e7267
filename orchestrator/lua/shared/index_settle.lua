-- What became of sessions that were due. One that was put in again meanwhile, with another score, stays as it is.
-- KEYS: the shard. ARGV: threes of session id, the score it was given when due, and when to look again in ms from now, ''
-- for never.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for first = 1, #ARGV, 3 do
  local session_id, score, again_ms = ARGV[first], tonumber(ARGV[first + 1]), ARGV[first + 2]
  if tonumber(redis.call('ZSCORE', KEYS[1], session_id) or '') == score then
    if again_ms == '' then
      redis.call('ZREM', KEYS[1], session_id)
    else
      redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(again_ms)), session_id)
    end
  end
end
return 'OK'
