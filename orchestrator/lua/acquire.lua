-- Takes the session's lease. The epoch rises with every change of owner and with every call of one owner.
-- ARGV: request id, nonce, epoch floor, lease_ms, ttl_ms, '1' where the session must be new.
-- Answers ACQUIRED with the new epoch, HELD with what is left of another owner's lease, or EXISTS.
local nonce, epoch_floor, lease_ms, ttl_ms, must_be_new =
  ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6] == '1'

local now = now_ms()
local record = redis.call('HMGET', record_key, 'epoch', 'nonce', 'lease_expires_ms', 'state')
local epoch, state = tonumber(record[1] or 0), record[4]

if record[1] and record[2] ~= nonce then
  local remaining_ms = tonumber(record[3]) - now
  if remaining_ms > 0 then
    return answer('HELD', epoch, remaining_ms)
  end
  if must_be_new and (state == 'OPEN' or state == 'FINISHED') then
    return answer('EXISTS', epoch)
  end
end

if not record[1] or state == 'CANCELLED' then
  redis.call('DEL', record_key, tokens_key, rounds_key)
  redis.call('HSET', record_key, 'state', 'CLAIMED',
    'prompt_length', '0', 'committed_length', '0', 'store_tokens', '0', 'tokens_bytes', '0')
end
epoch = math.max(epoch, epoch_floor) + 1
redis.call('HSET', record_key, 'epoch', whole(epoch), 'nonce', nonce, 'lease_expires_ms', whole(now + lease_ms))
redis.call('HDEL', record_key, 'abandoned_ms')
count_rounds_from_zero()
keep_for(ttl_ms)
return answer('ACQUIRED', epoch)
