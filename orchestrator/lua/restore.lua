-- Writes a whole checkpoint: after Opened, and again after the store lost the record.
-- ARGV: request id, epoch, nonce, round, committed length, lease_ms, ttl_ms, '1' where tokens are stored, all tokens as
-- little-endian int32, then the record's other fields as pairs of name and value.
-- Answers OK, DUPLICATE (the same owner wrote a later round already) or FENCED.
local epoch, nonce, round, committed_length, lease_ms, ttl_ms, store_tokens, tokens =
  tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9]
local NUM_LEADING_ARGUMENTS = 9

local record = redis.call('HMGET', record_key, 'epoch', 'nonce', 'round')
local record_epoch = tonumber(record[1] or 0)
if record_epoch > epoch or (record_epoch == epoch and record[2] ~= nonce) then
  return answer('FENCED', record_epoch)
end
if record_epoch == epoch and tonumber(record[3]) > round then
  return answer('DUPLICATE', epoch)
end

redis.call('DEL', record_key, tokens_key, rounds_key)
redis.call('HSET', record_key, unpack(ARGV, NUM_LEADING_ARGUMENTS + 1))
redis.call('HSET', record_key,
  'state', 'OPEN', 'epoch', whole(epoch), 'nonce', nonce, 'lease_expires_ms', whole(now_ms() + lease_ms),
  'round', whole(round), 'rounds_start', whole(round), 'rounds_start_length', committed_length,
  'committed_length', committed_length, 'store_tokens', store_tokens)
if store_tokens == '1' then
  redis.call('SET', tokens_key, tokens)
end
keep_for(ttl_ms)
return answer('OK', epoch)
