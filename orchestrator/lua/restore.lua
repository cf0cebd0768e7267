-- Writes a whole checkpoint: after Opened, and again after the store lost the record.
-- ARGV: request id, epoch, nonce, round, committed length, lease_ms, ttl_ms, '1' where tokens are stored, all tokens as
-- the record keeps them, the prefix digest, then the record's other fields as pairs of name and value.
-- Answers OK, DUPLICATE (the same owner wrote a later round already) or FENCED.
local epoch, nonce, round, committed_length, lease_ms, ttl_ms, store_tokens, tokens, digest =
  tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local NUM_LEADING_ARGUMENTS = 10

local record = redis.call('HMGET', record_key, 'epoch', 'nonce', 'round')
local record_epoch = tonumber(record[1] or 0)
if record_epoch > epoch or (record_epoch == epoch and record[2] ~= nonce) then
  return answer('FENCED', record_epoch)
end
if record_epoch == epoch and tonumber(record[3]) > round then
  return answer('DUPLICATE', epoch)
end

-- Where rounds ended: an owner's own history stays as far as the checkpoint goes, for clients that are behind it.
local function borders()
  local own = string.sub(digest, 1, BYTES_PER_DIGEST)
  local here = struct.pack('<i4', committed_length) .. own
  if record[2] ~= nonce then
    return here
  end
  local kept = redis.call('GET', rounds_key) or ''
  local length = #kept - #kept % BYTES_PER_ROUND
  while length > 0 do
    local round_end, after = struct.unpack('<i4', kept, length - BYTES_PER_ROUND + 1)
    if round_end < committed_length then
      return string.sub(kept, 1, length) .. here
    end
    if round_end == committed_length and string.sub(kept, after, length) ~= own then
      return here  -- other tokens than the checkpoint's
    end
    length = length - BYTES_PER_ROUND
  end
  return here
end

local rounds = borders()
redis.call('DEL', record_key, tokens_key)
redis.call('SET', rounds_key, rounds)
redis.call('HSET', record_key, unpack(ARGV, NUM_LEADING_ARGUMENTS + 1))
redis.call('HSET', record_key,
  'state', 'OPEN', 'epoch', whole(epoch), 'nonce', nonce, 'lease_expires_ms', whole(now_ms() + lease_ms),
  'round', whole(round), 'rounds_start', whole(round), 'rounds_start_length', whole(committed_length),
  'rounds_start_index', whole(#rounds / BYTES_PER_ROUND), 'committed_length', whole(committed_length),
  'store_tokens', store_tokens, 'tokens_bytes', whole(#tokens), 'prefix_digest', digest)
if store_tokens == '1' then
  redis.call('SET', tokens_key, tokens)
end
keep_for(ttl_ms)
return answer('OK', epoch)
