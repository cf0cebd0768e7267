import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from specdec.errors import (
    EmptyPromptError,
    InvalidParameterError,
    ModelLoadError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
)
from specdec.model.tokenizer import TextTokenizer
from specdec.params import ChatMessage, Prompt
from tests.unit.model.tiny import CHAT_TEMPLATE, END_TOKEN_ID, tiny_tokenizer


def with_template(template: str | None) -> TextTokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return TextTokenizer(tokenizer)


def changed(**changes: object) -> TextTokenizer:
    """The tiny tokenizer with entries of its model replaced."""
    definition = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    definition["model"] |= changes
    backend = Tokenizer.from_str(json.dumps(definition))
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_text_is_encoded_as_it_is() -> None:
    tokenizer = TextTokenizer(tiny_tokenizer())
    assert tokenizer.decode(tokenizer.encode_prompt(" Größe 🙂\n")) == " Größe 🙂\n"


def test_token_ids_are_taken_as_they_are() -> None:
    assert TextTokenizer(tiny_tokenizer()).encode_prompt((5, 319)) == [5, 319]


@pytest.mark.parametrize("token_id", [-1, 320, 2**40])
def test_a_token_id_that_no_text_has_is_refused(token_id: int) -> None:
    with pytest.raises(TokenOutOfVocabularyError):
        TextTokenizer(tiny_tokenizer()).encode_prompt((5, token_id))


@pytest.mark.parametrize("prompt", ["", ()])
def test_an_empty_prompt_is_refused(prompt: str | tuple[int, ...]) -> None:
    with pytest.raises(EmptyPromptError):
        TextTokenizer(tiny_tokenizer()).encode_prompt(prompt)


def test_a_prompt_that_no_tokens_could_bring_into_the_context_is_refused_unread() -> None:
    tokenizer = TextTokenizer(tiny_tokenizer())
    longest = "<|endoftext|>"
    fits: list[Prompt] = [longest * 8, (ChatMessage("user", longest * 4), ChatMessage("user", longest * 4)), (7,) * 8]
    for prompt in fits:
        tokenizer.require_short_enough(prompt, 8)
    assert len(tokenizer.encode_prompt(longest * 8)) == 8
    too_long: list[Prompt] = [
        longest * 8 + "x",
        (ChatMessage("user", longest * 8), ChatMessage("user", "x")),
        (7,) * 9,
    ]
    for prompt in too_long:
        with pytest.raises(PromptTooLongError) as raised:
            tokenizer.require_short_enough(prompt, 8)
        assert raised.value.metadata == {"context_limit": "8"}


def test_text_that_is_no_unicode_is_refused_without_being_quoted() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        TextTokenizer(tiny_tokenizer()).encode_prompt("secret \ud800")
    assert caught.value.metadata["field"] == "text"
    assert "secret" not in caught.value.message


def test_a_conversation_is_rendered_with_the_generation_prompt() -> None:
    tokenizer = TextTokenizer(tiny_tokenizer())
    token_ids = tokenizer.encode_prompt((ChatMessage("user", "hi"),))
    assert token_ids == tokenizer.encode_prompt("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert END_TOKEN_ID in token_ids


def test_turns_of_every_common_role_are_rendered() -> None:
    turns = tuple(ChatMessage(role, "") for role in ("system", "user", "assistant", "user"))
    assert TextTokenizer(tiny_tokenizer()).encode_prompt(turns)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", id="the template raises"),
        pytest.param("{{ messages[0]['content'].nothing.more }}", id="the template fails"),
        pytest.param(
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", id="left out"
        ),
        pytest.param(CHAT_TEMPLATE, id="printed, but never named"),
        pytest.param(None, id="no template"),
    ],
)
def test_a_conversation_that_the_template_does_not_know_is_refused(template: str | None) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        with_template(template).encode_prompt((ChatMessage("user", "hi"), ChatMessage("narrator", "secret")))
    assert caught.value.metadata["field"] == "chat"
    assert "secret" not in caught.value.message


def test_the_reason_that_a_template_gives_is_told() -> None:
    with pytest.raises(InvalidParameterError, match="roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").encode_prompt((ChatMessage("user", "hi"),))


def test_a_role_that_the_template_names_is_known() -> None:
    template = CHAT_TEMPLATE + "{% if messages[0].role == 'narrator' %}!{% endif %}"
    assert with_template(template).encode_prompt((ChatMessage("narrator", "once"),))


def test_padding_tokens_are_not_counted_and_do_not_change_the_fingerprint() -> None:
    vocabulary = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    padded = changed(vocab=vocabulary | {f"[PAD{token_id}]": token_id for token_id in range(320, 328)})
    plain = TextTokenizer(tiny_tokenizer())
    assert padded.vocabulary_size == plain.vocabulary_size == 320
    assert padded.fingerprint == plain.fingerprint


def test_the_fingerprint_changes_with_vocabulary_merges_and_special_ids() -> None:
    model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    first, second = list(model["vocab"])[-2:]
    swapped = model["vocab"] | {first: model["vocab"][second], second: model["vocab"][first]}
    more_special = tiny_tokenizer()
    more_special.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    tokenizers = [
        TextTokenizer(tiny_tokenizer()),
        changed(vocab=swapped),
        changed(merges=model["merges"][::-1]),
        TextTokenizer(more_special),
    ]
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == len(tokenizers)


def test_a_folder_gives_the_tokenizer_and_every_end_token_of_its_generation_config(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_TOKEN_ID, 0]}))
    tokenizer = TextTokenizer.from_folder(tmp_path)
    assert tokenizer.end_token_ids == {END_TOKEN_ID, 0}
    assert tokenizer.fingerprint == TextTokenizer(tiny_tokenizer()).fingerprint


def test_without_a_generation_config_the_model_config_names_the_end_tokens(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tiny_model_dir / "config.json").read_text()) | {"eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert TextTokenizer.from_folder(tmp_path).end_token_ids == {END_TOKEN_ID, 1}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer"):
        TextTokenizer.from_folder(tmp_path)
