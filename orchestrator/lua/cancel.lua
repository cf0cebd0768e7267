-- Deletes a session whoever owns it. Only its epoch stays, raised by one, until the TTL: that fences the owner, which would
-- otherwise take the deletion for a loss and restore the record.
-- ARGV: request id, ttl_ms, '1' where the session must be that of a tenant, the tenant.
-- Answers OK or LOST (there is no such session, or it is another tenant's).
local ttl_ms, has_tenant, tenant = ARGV[2], ARGV[3] == '1', ARGV[4]

local record = redis.call('HMGET', record_key, 'epoch', 'state', 'tenant')
local epoch = tonumber(record[1] or 0)
local is_anothers = has_tenant and record[3] and record[3] ~= tenant
if not record[1] or record[2] == 'CANCELLED' or is_anothers then
  return answer('LOST', epoch)
end
redis.call('DEL', record_key, tokens_key, rounds_key)
redis.call('HSET', record_key,
  'state', 'CANCELLED', 'epoch', whole(epoch + 1), 'nonce', '', 'lease_expires_ms', '0', 'round', '0')
keep_for(ttl_ms)
return answer('OK', epoch + 1)
