-- The same owner goes on under a higher epoch, at another verifier: whoever still acts under the old one is fenced.
-- ARGV: request id, epoch, nonce, lease_ms, ttl_ms. Answers OK with the new epoch, FENCED or LOST with the record's.
local epoch, nonce, lease_ms, ttl_ms = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5]

local denied, record_epoch = not_owner(epoch, nonce)
if denied then
  return answer(denied, record_epoch)
end
epoch = record_epoch + 1
redis.call('HSET', record_key, 'epoch', whole(epoch), 'lease_expires_ms', whole(now_ms() + lease_ms))
redis.call('HDEL', record_key, 'abandoned_ms')
count_rounds_from_zero()
keep_for(ttl_ms)
return answer('OK', epoch)
