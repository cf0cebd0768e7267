-- Adds the tokens of one round, or of several that follow one another, at a cost that grows with the new tokens alone.
-- ARGV: request id, epoch, nonce, verifier's cached length, drafter's cached length, drafter, ttl_ms; then for each
-- round: round, expected length (committed before the round), number of tokens, the tokens as the record keeps them (''
-- where it does not), prefix digest after the round.
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

local record = redis.call('HMGET', record_key, 'round', 'committed_length', 'rounds_start', 'rounds_start_length',
  'rounds_start_index', 'store_tokens', 'sealed_by', 'tokens_bytes', 'state')
local last_round, committed_length, rounds_start, rounds_start_length, rounds_start_index, tokens_bytes =
  tonumber(record[1]), tonumber(record[2]), tonumber(record[3]), tonumber(record[4]), tonumber(record[5]),
  tonumber(record[8])
local stores_tokens = record[6] == '1'
local compares_tokens = stores_tokens and (record[7] or '') == ''  -- no two seals of the same tokens are alike

-- Nobody wrote a checkpoint to append to, or a key of the record was evicted by itself.
if record[9] == 'CLAIMED'
  or redis.call('STRLEN', rounds_key) ~= BYTES_PER_ROUND * (rounds_start_index + last_round - rounds_start)
  or (stores_tokens and redis.call('STRLEN', tokens_key) ~= tokens_bytes) then
  return answer('LOST', epoch)
end

local function entry_at(index)
  local start = BYTES_PER_ROUND * index
  return redis.call('GETRANGE', rounds_key, start, start + BYTES_PER_ROUND - 1)
end

local function round_entry(number)
  return entry_at(rounds_start_index + number - rounds_start - 1)
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

-- Of a round before the last restore, whose number tells no more where its entry is.
local function is_among_the_first(entry)
  local round_end = struct.unpack('<i4', entry)
  for index = rounds_start_index - 1, 0, -1 do
    local candidate = entry_at(index)
    if candidate == entry then
      return true
    end
    if struct.unpack('<i4', candidate) < round_end then
      return false
    end
  end
  return false
end

local function is_duplicate(round, expected_length, tokens, entry)
  if compares_tokens and not same_tokens(expected_length, tokens) then
    return false
  end
  if round <= rounds_start then
    return compares_tokens or is_among_the_first(entry)
  end
  return start_of_round(round) == expected_length and round_entry(round) == entry
end

local newest_digest = nil

local function add(round, expected_length, num_tokens, tokens, digest)
  local entry = struct.pack('<i4', expected_length + num_tokens) .. string.sub(digest, 1, BYTES_PER_DIGEST)
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
    tokens_bytes = redis.call('APPEND', tokens_key, tokens)
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
    'drafter', drafter, 'tokens_bytes', whole(tokens_bytes))
  keep_for(ttl_ms)
end
return answer(status, epoch)
