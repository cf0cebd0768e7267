-- Makes the caller the session's owner, whoever was it before: the epoch fences that one, here and at every verifier. It
-- is a client that asks, whose stream is broken, and it need not wait until a dead owner's lease has run out.
-- ARGV: request id, nonce, epoch floor, lease_ms, ttl_ms, '1' where the session must be new, the tenant.
-- Answers ACQUIRED with the owner's epoch, or EXISTS: it was to be new, and another's claim or record is there.
local nonce, epoch_floor, lease_ms, ttl_ms, must_be_new, tenant =
  ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6] == '1', ARGV[7]

local now = now_ms()
local record = redis.call('HMGET', record_key, 'epoch', 'nonce', 'lease_expires_ms', 'state')
local epoch, is_own, state = tonumber(record[1] or 0), record[2] == nonce, record[4]

if must_be_new and record[1] and not is_own then
  if state == 'OPEN' or state == 'FINISHED' or tonumber(record[3]) > now then
    return answer('EXISTS', epoch)
  end
end

-- An owner claims again above what it knows. A lower floor is that of a claim which it gave up, and which comes only now
-- that its record is written.
local comes_late = is_own and state == 'OPEN' and epoch_floor < epoch
if comes_late then
  return answer('ACQUIRED', epoch)
end

if not record[1] or state == 'CANCELLED' then
  redis.call('DEL', record_key, tokens_key, rounds_key)
  redis.call('HSET', record_key, 'state', 'CLAIMED',
    'prompt_length', '0', 'committed_length', '0', 'store_tokens', '0', 'tokens_bytes', '0')
end
if state ~= 'OPEN' and state ~= 'FINISHED' then
  redis.call('HSET', record_key, 'tenant', tenant)  -- else the checkpoint's stays: a cancel asks for it before Opened too
end
epoch = math.max(epoch, epoch_floor) + 1
redis.call('HSET', record_key, 'epoch', whole(epoch), 'nonce', nonce, 'lease_expires_ms', whole(now + lease_ms))
redis.call('HDEL', record_key, 'abandoned_ms')
count_rounds_from_zero()
keep_for(ttl_ms)
return answer('ACQUIRED', epoch)
