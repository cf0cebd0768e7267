from specdec.model.synthetic_tokenizer import END_TOKEN_ID, FIRST_WORD_ID, synthetic_tokenizer
from specdec.model.text import OutputText
from specdec.params import ChatMessage


def test_any_text_comes_back_from_its_bytes() -> None:
    tokenizer = synthetic_tokenizer(512)
    text = "Grüße, 世界!\n\tdef f(): pass"
    token_ids = tokenizer.encode_prompt(text)
    assert len(token_ids) == len(text.encode())
    assert tokenizer.decode(token_ids) == text


def test_ids_beyond_the_bytes_are_words_each_of_its_own() -> None:
    tokenizer = synthetic_tokenizer(6000)
    words = [tokenizer.decode([token_id]) for token_id in range(FIRST_WORD_ID, 6000)]
    assert len(set(words)) == len(words)
    assert all(word.startswith(" ") and word[1:].isalpha() and len(word) <= 7 for word in words)


def test_every_id_is_a_token_and_one_ends_an_output() -> None:
    tokenizer = synthetic_tokenizer(4096)
    assert tokenizer.vocabulary_size == 4096
    assert tokenizer.end_token_ids == {END_TOKEN_ID}
    assert tokenizer.decode([END_TOKEN_ID]) == ""


def test_a_conversation_keeps_its_turns_apart() -> None:
    tokenizer = synthetic_tokenizer(512)
    conversation = (ChatMessage("system", "be brief"), ChatMessage("user", "hello"))
    token_ids = tokenizer.encode_prompt(conversation)
    assert tokenizer.decode(token_ids) == "system\nbe brief\nuser\nhello\nassistant\n"
    assert token_ids.count(1) == 3


def test_the_fingerprint_is_the_vocabularys() -> None:
    assert synthetic_tokenizer(600).fingerprint == synthetic_tokenizer(600).fingerprint
    assert synthetic_tokenizer(600).fingerprint != synthetic_tokenizer(601).fingerprint


def test_output_can_be_streamed_as_text() -> None:
    tokenizer = synthetic_tokenizer(512)
    output = OutputText(tokenizer, stop_strings=("be bi",))
    step = output.push([FIRST_WORD_ID, FIRST_WORD_ID + 1, FIRST_WORD_ID + 2, FIRST_WORD_ID])
    assert (step.text, step.num_tokens_used, step.stopped) == (" ba ", 3, True)
