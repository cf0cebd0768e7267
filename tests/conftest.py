"""What tests of every room share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights: 320 tokens, 8 padding rows, context of 512."""
    from tests.unit.model.tiny import make_tiny_model_dir  # only tests that need a model pay for importing torch

    return make_tiny_model_dir(tmp_path_factory.mktemp("tiny_model"), num_padding_rows=8)
