"""Text to token ids and back, as the model was trained on them.

Knows chat templates, special tokens and vocabularies; refuses to know weights. Fast tokenizers alone are taken: their
encoding takes about 1 s for a megabyte of text and releases the interpreter's lock, so a server encodes in a thread.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.errors import (
    EmptyPromptError,
    InvalidParameterError,
    ModelLoadError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
)
from specdec.model.text_pieces import TextPieces
from specdec.params import ChatMessage, Prompt, is_chat

_COMMON_ROLES = frozenset({"system", "user", "assistant"})


class TextTokenizer:
    """A fast tokenizer with its chat template.

    Args:
        tokenizer: as transformers loads it.
        end_token_ids: ends of an output beside the tokenizer's own end-of-sequence token.
    """

    vocabulary_size: int
    """Ids that text can have: padding rows of the model, and tokens named as their padding, are beyond it."""
    end_token_ids: frozenset[int]
    fingerprint: str
    """SHA-256 over vocabulary, merges and special ids: equal for models that may guess for each other."""
    pieces: TextPieces

    def __init__(self, tokenizer: PreTrainedTokenizerFast, end_token_ids: Iterable[int] = ()) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelLoadError("the model has no fast tokenizer: a tokenizer.json is needed")
        self._templated = tokenizer
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        definition = json.loads(self._tokenizer.to_str())
        vocabulary = {
            token: token_id
            for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()
            if token != f"[PAD{token_id}]"  # what GGUF converters call the rows beyond the vocabulary
        }
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        self._longest_token_chars = max((len(token) for token in vocabulary), default=1)
        own_end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.end_token_ids = frozenset({*own_end, *end_token_ids})
        self.fingerprint = _fingerprint(vocabulary, definition)
        self.pieces = TextPieces(self._tokenizer, definition["decoder"])

    @classmethod
    def from_folder(cls, folder: Path) -> "TextTokenizer":
        """The tokenizer of a Hugging Face folder, with the end tokens of its generation config.

        Raises ModelLoadError where there is none, or not a fast one.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises what it likes here
            raise ModelLoadError(f"the tokenizer in {folder} cannot be read: {error}") from error
        return cls(tokenizer, _generation_end_token_ids(folder))

    def require_short_enough(self, prompt: Prompt, context_limit: int) -> None:
        """Raises PromptTooLongError for text so long that even the longest tokens could not bring it into the context,
        and for more token ids or turns of a conversation than that. Costs nothing, where encoding takes seconds."""
        if isinstance(prompt, str):
            size, unit, limit = len(prompt), "characters", context_limit * self._longest_token_chars
        elif is_chat(prompt) and len(prompt) > context_limit:
            size, unit, limit = len(prompt), "turns", context_limit  # empty ones, each of which the template mentions
        elif is_chat(prompt):
            size = sum(len(turn.content) for turn in prompt if isinstance(turn, ChatMessage))
            unit, limit = "characters", context_limit * self._longest_token_chars
        else:
            size, unit, limit = len(prompt), "tokens", context_limit
        if size > limit:
            raise PromptTooLongError(
                f"the prompt has {size} {unit}; the context takes {context_limit} tokens",
                context_limit=str(context_limit),
            )

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of text as it is, of a conversation in the model's template, or the checked ids themselves.

        Raises:
            EmptyPromptError: no token comes out.
            InvalidParameterError: the model has no chat template, or its template refuses the conversation.
            TokenOutOfVocabularyError: an id that no text has.
        """
        if isinstance(prompt, str):
            token_ids = self._encode(prompt, "text", add_special_tokens=True)
        elif messages := [turn for turn in prompt if isinstance(turn, ChatMessage)]:
            token_ids = self._encode(self._render_chat(messages), "chat", add_special_tokens=False)
        else:
            token_ids = [token_id for token_id in prompt if isinstance(token_id, int)]
        if not token_ids:
            raise EmptyPromptError("the prompt has no tokens")
        if min(token_ids) < 0 or max(token_ids) >= self.vocabulary_size:
            raise TokenOutOfVocabularyError(f"token ids of this model are in [0, {self.vocabulary_size})")
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add to what is before them. Special tokens add none; broken UTF-8 is U+FFFD."""
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode(errors="replace")

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # A batch of one: encode() would hold the interpreter's lock all the time, encode_batch() lets it go.
            return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
        except (TypeError, UnicodeEncodeError):  # surrogates; the error itself would quote the text
            raise InvalidParameterError(f"{field}: not valid Unicode", field=field) from None

    def _render_chat(self, messages: Sequence[ChatMessage]) -> str:
        if not self._templated.chat_template:
            raise InvalidParameterError("chat: this model has no chat template; send text", field="chat")
        text = self._apply_template([(message.role, message.content) for message in messages])
        self._require_known_roles([message.role for message in messages])
        return text

    def _require_known_roles(self, roles: Sequence[str]) -> None:
        """Refuses roles that a template prints though the model never saw them, and those whose turns it leaves out."""
        named = str(self._templated.chat_template)
        markers = [f"§{turn}§" for turn in range(len(roles))]
        heard = self._apply_template(list(zip(roles, markers, strict=True)))
        for role, marker in zip(roles, markers, strict=True):
            in_template = f"'{role}'" in named or f'"{role}"' in named
            if marker not in heard or not (in_template or role in _COMMON_ROLES):
                raise InvalidParameterError(
                    "chat: this model's template does not know the role of a turn", field="chat"
                )

    def _apply_template(self, turns: Sequence[tuple[str, str]]) -> str:
        conversation = [{"role": role, "content": content} for role, content in turns]
        try:
            return str(self._templated.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program; other errors than its own may quote the conversation
            reason = f": {error}" if type(error) is TemplateError else ""
            message = f"chat: the model's chat template refuses this conversation{reason}"
            raise InvalidParameterError(message, field="chat") from None


def _fingerprint(vocabulary: dict[str, int], definition: dict[str, Any]) -> str:
    canonical = json.dumps(
        {
            "vocabulary": vocabulary,
            "merges": [
                merge.split(" ") if isinstance(merge, str) else merge for merge in definition["model"].get("merges", ())
            ],
            "special_ids": sorted(token["id"] for token in definition["added_tokens"] if token["special"]),
        },
        sort_keys=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def _generation_end_token_ids(folder: Path) -> list[int]:
    """The generation config's end tokens; the model config's where there is none, as transformers does."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        if path.is_file():
            try:
                ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError, AttributeError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
            return [ends] if isinstance(ends, int) else list(ends or ())
    return []
