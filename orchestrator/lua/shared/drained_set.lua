-- Notes an endpoint as drained, or no longer. KEYS: the hash. ARGV: endpoint, '1' | '0', ttl_ms.
if ARGV[2] == '1' then
  redis.call('HSET', KEYS[1], ARGV[1], '1')
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 'OK'
