"""What proves to a verifier that the owner of a session sent it a drafter."""

import hashlib
import hmac

from specdec.ids import AttachmentId


def attach_key(attach_secret: bytes, attachment_id: AttachmentId) -> bytes:
    """HMAC-SHA256(attach secret, attachment id as 8 big-endian bytes)."""
    return hmac.digest(attach_secret, attachment_id.to_bytes(8, "big", signed=True), hashlib.sha256)
