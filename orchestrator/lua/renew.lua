-- Prolongs the owner's lease and the record's life.
-- ARGV: request id, epoch, nonce, lease_ms, ttl_ms. Answers OK, FENCED or LOST.
local epoch, nonce, lease_ms, ttl_ms = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5]

local denied, record_epoch = not_owner(epoch, nonce)
if denied then
  return answer(denied, record_epoch)
end
redis.call('HSET', record_key, 'lease_expires_ms', whole(now_ms() + lease_ms))
redis.call('HDEL', record_key, 'abandoned_ms')
keep_for(ttl_ms)
return answer('OK', epoch)
