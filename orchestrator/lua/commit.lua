-- Adds one round's tokens to the record, at a cost that grows with the new tokens alone.
-- ARGV: request id, epoch, nonce, round, expected length (committed before the round), number of tokens, the tokens as
-- little-endian int32 ('' where they are not stored), prefix digest after the round, verifier's cached length, drafter's
-- cached length, drafter, ttl_ms.
-- Answers OK, DUPLICATE (this round is there with these tokens), CONFLICT (it is there with others), GAP (rounds or
-- tokens before it are missing), FENCED or LOST.
local epoch, nonce, round, expected_length, num_tokens =
  tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local tokens, digest, verifier_cached_length, drafter_cached_length, drafter, ttl_ms =
  ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12]

local denied, record_epoch = not_owner(epoch, nonce)
if denied then
  return answer(denied, record_epoch)
end

local record = redis.call('HMGET', record_key,
  'round', 'committed_length', 'rounds_start', 'rounds_start_length', 'store_tokens')
local last_round, committed_length, rounds_start, rounds_start_length =
  tonumber(record[1]), tonumber(record[2]), tonumber(record[3]), tonumber(record[4])
local stores_tokens = record[5] == '1'

-- A key of the record may have been evicted by itself.
if redis.call('STRLEN', rounds_key) ~= BYTES_PER_ROUND * (last_round - rounds_start)
  or (stores_tokens and redis.call('STRLEN', tokens_key) ~= BYTES_PER_TOKEN * committed_length) then
  return answer('LOST', epoch)
end

local this_round = struct.pack('<i4', expected_length + num_tokens) .. string.sub(digest, 1, 12)

local function round_entry(number)
  local start = BYTES_PER_ROUND * (number - rounds_start - 1)
  return redis.call('GETRANGE', rounds_key, start, start + BYTES_PER_ROUND - 1)
end

local function start_of_round(number)
  if number == rounds_start + 1 then
    return rounds_start_length
  end
  return (struct.unpack('<i4', round_entry(number - 1)))
end

local function same_tokens()
  local start = BYTES_PER_TOKEN * expected_length
  return redis.call('GETRANGE', tokens_key, start, start + #tokens - 1) == tokens
end

local function is_duplicate()
  if stores_tokens and not same_tokens() then
    return false
  end
  if round <= rounds_start then  -- before the last restore: the tokens are all there is to compare
    return stores_tokens
  end
  return start_of_round(round) == expected_length and round_entry(round) == this_round
end

if round > last_round + 1 or (round == last_round + 1 and expected_length > committed_length) then
  return answer('GAP', epoch)
end
if round <= last_round then
  return answer(is_duplicate() and 'DUPLICATE' or 'CONFLICT', epoch)
end
if expected_length < committed_length then
  return answer('CONFLICT', epoch)
end

if stores_tokens then
  redis.call('APPEND', tokens_key, tokens)
end
redis.call('APPEND', rounds_key, this_round)
redis.call('HSET', record_key,
  'round', whole(round), 'committed_length', whole(expected_length + num_tokens), 'prefix_digest', digest,
  'verifier_cached_length', verifier_cached_length, 'drafter_cached_length', drafter_cached_length, 'drafter', drafter)
keep_for(ttl_ms)
return answer('OK', epoch)
