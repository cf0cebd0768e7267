import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specdec.errors import ModelLoadError
from specdec.model.tokenizer import TextTokenizer
from tests.unit.model.tiny import tiny_tokenizer

WORDS = ["▁the", "▁", "cat", "é", "s▁s"]


@functools.cache
def sentence_piece_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(st.lists(st.one_of(st.integers(256, 255 + len(WORDS)), st.text(min_size=1, max_size=2)), max_size=12))
def test_byte_fallback_gives_transformers_text_and_keeps_the_space_after_the_prompt(parts: list[int | str]) -> None:
    token_ids: list[int] = []
    for part in parts:
        token_ids += [part] if isinstance(part, int) else part.encode()
    backend = sentence_piece_tokenizer().backend_tokenizer
    text = TextTokenizer(sentence_piece_tokenizer()).decode(token_ids)
    assert text.removeprefix(" ") == backend.decode(token_ids)


def test_a_tokenizer_without_a_decoder_joins_its_tokens_by_spaces() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"to": 0, "be": 1}, unk_token="to")))
    assert TextTokenizer(words).decode([0, 1]) == " to be"


def test_an_added_token_with_characters_outside_the_byte_alphabet_is_written_as_it_is() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("größe", special=False)])
    assert TextTokenizer(tokenizer).decode([320, 321]) == tokenizer.backend_tokenizer.decode([320, 321])


def test_a_decoder_whose_text_depends_on_more_than_bytes_is_refused() -> None:
    backend = tiny_tokenizer().backend_tokenizer
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
