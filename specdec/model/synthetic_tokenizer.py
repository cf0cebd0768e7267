"""A tokenizer for models that never learnt a language: any text goes in, and what comes out can be read.

Text becomes one token for each byte. The ids beyond are short made-up words that a synthetic model says and nobody
types. Depends on the vocabulary's size alone, and so does its fingerprint.
"""

import itertools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.model.tokenizer import TextTokenizer

END_TOKEN_ID = 0
_SPECIAL_TOKENS = ("<|end|>", "<|turn|>")
FIRST_WORD_ID = len(_SPECIAL_TOKENS) + 256

_SPACE = "Ġ"  # how byte-level tokenizers write it
_SYLLABLES = tuple(map("".join, itertools.product("bdfgklmnprstvz", "aeiou")))
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] + '\n' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def synthetic_tokenizer(vocabulary_size: int) -> TextTokenizer:
    """All of its ids are real tokens; there is room for about 24 million words."""
    words = itertools.chain.from_iterable(itertools.product(_SYLLABLES, repeat=length) for length in itertools.count(1))
    written = (_SPACE + "".join(word) for word in words)
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [
        *_SPECIAL_TOKENS,
        *byte_tokens,
        *itertools.islice(written, vocabulary_size - len(byte_tokens) - len(_SPECIAL_TOKENS)),
    ]
    bytes_alone = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(vocabulary)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, eos_token=_SPECIAL_TOKENS[END_TOKEN_ID], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return TextTokenizer(tokenizer)
