-- Stands before every script of this folder. Knows how a session's record is laid out (see orchestrator/record.py), who
-- owns it, and how a retried call gets the answer that it got the first time.
local record_key, tokens_key, rounds_key, replies_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local request_id = ARGV[1]

local NUM_REPLIES_KEPT = 32
local REPLIES_TTL_MS = 60000  -- far longer than a client library goes on retrying
local BYTES_PER_TOKEN = 4  -- where tokens are not sealed
local BYTES_PER_ROUND, BYTES_PER_DIGEST = 16, 12  -- end of the round as little-endian int32, start of the digest there

local function whole(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function remembered_answer()
  for _, reply in ipairs(redis.call('LRANGE', replies_key, 0, -1)) do
    local id, status, epoch = string.match(reply, '^(%S+) (%S+) (%S+)$')
    if id == request_id then
      return {status, epoch}
    end
  end
  return nil
end

local function answer(status, epoch)
  local reply = {status, whole(epoch)}
  redis.call('LPUSH', replies_key, request_id .. ' ' .. table.concat(reply, ' '))
  redis.call('LTRIM', replies_key, 0, NUM_REPLIES_KEPT - 1)
  redis.call('PEXPIRE', replies_key, REPLIES_TTL_MS)
  return reply
end

-- What a caller that is not the record's owner is told, and the record's epoch. LOST: the store forgot what this caller
-- wrote, so it may restore. FENCED: somebody else owns the session now.
local function not_owner(epoch, nonce)
  local record = redis.call('HMGET', record_key, 'epoch', 'nonce')
  local record_epoch = tonumber(record[1] or 0)
  if record_epoch < epoch then
    return 'LOST', record_epoch
  end
  if record_epoch > epoch or record[2] ~= nonce then
    return 'FENCED', record_epoch
  end
  return nil, record_epoch
end

-- For a new epoch. The entries of earlier rounds stay: they tell a client's tokens from others' where tokens are not kept.
local function count_rounds_from_zero()
  redis.call('HSET', record_key, 'round', '0', 'rounds_start', '0',
    'rounds_start_length', redis.call('HGET', record_key, 'committed_length'),
    'rounds_start_index', whole(redis.call('STRLEN', rounds_key) / BYTES_PER_ROUND))
end

local function keep_for(ttl_ms)
  redis.call('PEXPIRE', record_key, ttl_ms)
  redis.call('PEXPIRE', tokens_key, ttl_ms)
  redis.call('PEXPIRE', rounds_key, ttl_ms)
end

local remembered = remembered_answer()
if remembered then
  return remembered
end
