"""The bytes that each token adds to a text, so that output is detokenised token by token at a constant cost.

Knows the decoders that causal language models have: byte-level BPE (GPT-2's alphabet of 256 characters) and
SentencePiece with byte fallback. Refuses any other decoder, since a text that depends on more than its tokens' bytes
cannot be streamed exactly.
"""

import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from specdec.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte: printable Latin-1 for itself, U+0100 and on for the rest."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token is written as it is
        return token.encode()


def _joined_by_spaces_bytes(token: str) -> bytes:
    return b" " + token.encode()


def _sentence_piece(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": replacement}:
                replacements.append((replacement, " "))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"} | {"type": "Strip", "stop": 0}:
                pass  # strip acts on the first token of a text alone, and an output continues its prompt
            case _:
                raise ModelLoadError(f"the tokenizer's decoder has a step that cannot be streamed: {step.get('type')}")

    def to_bytes(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return to_bytes


def _bytes_of_token(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    match decoder:
        case None:
            return _joined_by_spaces_bytes
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return _byte_level_bytes
        case {"type": "Sequence", "decoders": steps}:
            return _sentence_piece(steps)
        case _:
            return _sentence_piece([decoder])


class TextPieces:
    """What each token id adds to a text that it continues. Special tokens and ids without a token add nothing.

    Args:
        decoder: the entry of that name in tokenizer.json. Raises ModelLoadError where it cannot be streamed.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._bytes_of_token = _bytes_of_token(decoder)
        added = tokenizer.get_added_tokens_decoder()
        self._pieces = {token_id: b"" for token_id, token in added.items() if token.special}

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else self._bytes_of_token(token)
        return piece
