"""Speculative decoding as microservices. Shared code: it imports no service."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Version of the drafter-verifier protocol, sent in every Attach."""
