-- The record, its tokens and where its rounds ended at one moment, all empty where there is none. ARGV: request id.
return {redis.call('HGETALL', record_key), redis.call('GET', tokens_key) or '', redis.call('GET', rounds_key) or ''}
