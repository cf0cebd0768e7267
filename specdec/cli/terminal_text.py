"""Model output on a terminal: no escape sequence that a model wrote may reach it."""

import unicodedata

_KEPT = "\n\t"


def printable(text: str) -> str:
    """Control characters but line feed and tab as visible escapes."""
    if text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    is_control = unicodedata.category(character) == "Cc" and character not in _KEPT
    return f"\\x{ord(character):02x}" if is_control else character
