-- The drained endpoints. They are remembered as long as somebody asks. KEYS: the hash. ARGV: ttl_ms.
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('HKEYS', KEYS[1])
