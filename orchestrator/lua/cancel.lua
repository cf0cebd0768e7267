-- Deletes a session whoever owns it. Only its epoch stays, raised by one, until the TTL: that fences the owner, which would
-- otherwise take the deletion for a loss and restore the record.
-- ARGV: request id, ttl_ms. Answers OK or LOST (there is no such session).
local ttl_ms = ARGV[2]

local record = redis.call('HMGET', record_key, 'epoch', 'state')
local epoch = tonumber(record[1] or 0)
if not record[1] or record[2] == 'CANCELLED' then
  return answer('LOST', epoch)
end
redis.call('DEL', record_key, tokens_key, rounds_key)
redis.call('HSET', record_key,
  'state', 'CANCELLED', 'epoch', whole(epoch + 1), 'nonce', '', 'lease_expires_ms', '0', 'round', '0')
keep_for(ttl_ms)
return answer('OK', epoch + 1)
