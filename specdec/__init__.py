"""Speculative decoding as microservices. Shared code: it imports no service."""

import os

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Version of the drafter-verifier protocol, sent in every Attach."""

# Here and not in specdec.wire, since gRPC reads it when it is imported. Its lines are no JSON; what they tell (a peer
# that closes its connection, a stranger who fails the handshake) our errors tell to whoever called.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
