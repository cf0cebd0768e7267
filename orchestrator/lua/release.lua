-- Gives the lease back, so that another owner may take the session at once. The record stays until its TTL.
-- ARGV: request id, epoch, nonce, ttl_ms, the reason why the output ended or '' where it did not.
-- Answers OK, FENCED or LOST.
local epoch, nonce, ttl_ms, finish_reason = tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]

local denied, record_epoch = not_owner(epoch, nonce)
if denied then
  return answer(denied, record_epoch)
end
redis.call('HSET', record_key, 'lease_expires_ms', '0')
-- A claim without a checkpoint has no output that could have ended: commits to it are LOST, as before.
if finish_reason ~= '' and redis.call('HGET', record_key, 'state') ~= 'CLAIMED' then
  redis.call('HSET', record_key, 'state', 'FINISHED', 'finish_reason', finish_reason)
end
keep_for(ttl_ms)
return answer('OK', epoch)
