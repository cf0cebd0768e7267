-- Adds the tokens of one round, or of several that follow one another, at a cost that grows with the new tokens alone.
-- ARGV: request id, epoch, nonce, verifier's cached length, drafter's cached length, drafter, ttl_ms; then for each
-- round: round, expected length (committed before the round), number of tokens, the tokens as little-endian int32 (''
-- where they are not stored), prefix digest after the round.
-- Answers OK (something was added, the rest was there), DUPLICATE (every round is there with these tokens), FENCED or
-- LOST; and of the first round that cannot be added, CONFLICT (it is there with other tokens) or GAP (rounds or tokens
-- before it are missing). What stands before that one is added.
local FIRST_ROUND_ARGUMENT, ARGUMENTS_PER_ROUND = 8, 5
local epoch, nonce = tonumber(ARGV[2]), ARGV[3]
local verifier_cached_length, drafter_cached_length, drafter, ttl_ms = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

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

local function same_tokens(expected_length, tokens)
  local start = BYTES_PER_TOKEN * expected_length
  return redis.call('GETRANGE', tokens_key, start, start + #tokens - 1) == tokens
end

local function is_duplicate(round, expected_length, tokens, entry)
  if stores_tokens and not same_tokens(expected_length, tokens) then
    return false
  end
  if round <= rounds_start then  -- before the last restore: the tokens are all there is to compare
    return stores_tokens
  end
  return start_of_round(round) == expected_length and round_entry(round) == entry
end

local newest_digest = nil

local function add(round, expected_length, num_tokens, tokens, digest)
  local entry = struct.pack('<i4', expected_length + num_tokens) .. string.sub(digest, 1, 12)
  if round > last_round + 1 or (round == last_round + 1 and expected_length > committed_length) then
    return 'GAP'
  end
  if round <= last_round then
    return is_duplicate(round, expected_length, tokens, entry) and 'DUPLICATE' or 'CONFLICT'
  end
  if expected_length < committed_length then
    return 'CONFLICT'
  end
  if stores_tokens then
    redis.call('APPEND', tokens_key, tokens)
  end
  redis.call('APPEND', rounds_key, entry)
  last_round, committed_length, newest_digest = round, expected_length + num_tokens, digest
  return 'OK'
end

local status = 'DUPLICATE'
for first = FIRST_ROUND_ARGUMENT, #ARGV, ARGUMENTS_PER_ROUND do
  local added = add(
    tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2]), ARGV[first + 3], ARGV[first + 4])
  if added ~= 'DUPLICATE' then
    status = added
  end
  if added == 'GAP' or added == 'CONFLICT' then
    break
  end
end

if newest_digest then
  redis.call('HSET', record_key,
    'round', whole(last_round), 'committed_length', whole(committed_length), 'prefix_digest', newest_digest,
    'verifier_cached_length', verifier_cached_length, 'drafter_cached_length', drafter_cached_length,
    'drafter', drafter)
  keep_for(ttl_ms)
end
return answer(status, epoch)
