"""Everything that touches gRPC: server, channel, the mapping of errors and the mapping of messages. No domain logic."""

import os

# grpc's own lines are no JSON, and what they tell (a peer that closes its connection) is told by our errors.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
