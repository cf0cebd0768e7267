"""Speculative decoding as microservices. Shared code: it imports no service."""

import os

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Version of what roles say to one another, sent in every Attach and every status.

It rises where an older peer would misunderstand: then peers of the two versions refuse each other. An added field does
not raise it, since who does not know the field passes it over, and nothing that is right without it may depend on it
(docs/adr/0014)."""

# Here and not in specdec.wire, since gRPC reads it when it is imported. Its lines are no JSON; what they tell (a peer
# that closes its connection, a stranger who fails the handshake) our errors tell to whoever called.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
