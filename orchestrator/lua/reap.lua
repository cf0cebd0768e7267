-- Whether a session is without an owner, decided by the store's own clock. Of one that nobody opened nothing is left; one
-- that was opened may be resumed for a while longer. Asked twice, it answers the second time as the first.
-- ARGV: request id, abandoned_ttl_ms.
-- Answers LIVE with what is left of its lease, FREED, ABANDONED, or GONE where there is nothing to watch any more.
local abandoned_ttl_ms = tonumber(ARGV[2])

local record = redis.call('HMGET', record_key, 'lease_expires_ms', 'state', 'abandoned_ms')
local state = record[2]
if state ~= 'CLAIMED' and state ~= 'OPEN' then
  return {'GONE', '0'}
end
local now = now_ms()
local remaining_ms = tonumber(record[1]) - now
if remaining_ms > 0 then
  return {'LIVE', whole(remaining_ms)}
end
if state == 'CLAIMED' then
  redis.call('DEL', record_key, tokens_key, rounds_key)
  return {'FREED', '0'}
end
if not record[3] then
  redis.call('HSET', record_key, 'abandoned_ms', whole(now))
  if redis.call('PTTL', record_key) > abandoned_ttl_ms then
    keep_for(whole(abandoned_ttl_ms))
  end
end
return {'ABANDONED', '0'}
