"""Real weights: fetched and dequantised by the first test that needs them, unless the cache has them."""

import pytest

from specdec.model import sources
from specdec.model.cache import cache_root
from specdec.model.catalog import NAMED_MODELS
from specdec.model.loading import load_model
from specdec.model.runner import Rows
from specdec.model.sources import find_model
from specdec.model.text import OutputText
from specdec.model.tokenizer import TextTokenizer
from specdec.params import ChatMessage

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


def cached_tokenizer(name: str) -> TextTokenizer:
    """The large pair is not fetched for a test."""
    if not list(cache_root().glob(f"*/{name}-{NAMED_MODELS[name].sha256[:12]}")):
        pytest.skip(f"{name} is not in the cache; any command with --model {name} puts it there")
    return TextTokenizer.from_folder(find_model(name).path)


def test_smollm2_answers_in_a_chat_and_its_second_start_neither_fetches_nor_dequantises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_model("smollm2-135m")
    monkeypatch.setattr(sources, "fetch_gguf", None)
    monkeypatch.setattr(sources, "dequantise", None)
    loaded = load_model("smollm2-135m", device="cpu")
    assert (loaded.tokenizer.vocabulary_size, loaded.info.context_limit) == (49_152, 8192)
    token_ids = loaded.tokenizer.encode_prompt((ChatMessage("user", "What is the capital of France?"),))
    cache, output, text = loaded.runner.new_cache(), OutputText(loaded.tokenizer), ""
    for _ in range(24):
        (logits,) = loaded.runner.forward([Rows(cache, token_ids, logits_from=len(token_ids) - 1)])
        token_ids = [int(logits[0].argmax())]
        if token_ids[0] in loaded.tokenizer.end_token_ids:
            break
        text += output.push(token_ids).text
    assert "Paris" in text + output.flush()


def test_the_qwen_pair_has_one_tokenizer_and_smollm2_another() -> None:
    target, draft = cached_tokenizer("qwen-coder-1.5b"), cached_tokenizer("qwen-coder-0.5b")
    assert target.fingerprint == draft.fingerprint
    assert target.vocabulary_size == 151_665  # 151,936 rows, the rest is padding
    assert target.end_token_ids == {151_645, 151_643}
    assert TextTokenizer.from_folder(find_model("smollm2-135m").path).fingerprint != target.fingerprint
