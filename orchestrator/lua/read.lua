-- The record and its tokens at one moment, both empty where there is none. ARGV: request id.
return {redis.call('HGETALL', record_key), redis.call('GET', tokens_key) or ''}
