"""Everything that touches gRPC: server, channel, the mapping of errors and the mapping of messages. No domain logic."""
