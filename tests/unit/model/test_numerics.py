import pytest
import torch

from specdec.messages import Numerics
from specdec.model.linear import choose_kernel
from specdec.model.numerics import digest_of_parameters, numerics_of
from tests.unit.model.tiny import tiny_model

CPU = torch.device("cpu")


def numerics(digest: str = "a", dtype: torch.dtype = torch.float16, **options: object) -> Numerics:
    config = tiny_model(**options).config  # type: ignore[arg-type]
    return numerics_of(config, digest, kernel=choose_kernel(CPU, dtype), device=CPU)


def test_equal_servers_have_equal_fingerprints() -> None:
    assert numerics() == numerics()


def test_weights_kernel_and_configuration_are_all_in_the_fingerprint() -> None:
    variants = [
        numerics(),
        numerics(digest="b"),
        numerics(dtype=torch.float32),
        numerics(rms_norm_eps=1e-3),
        numerics(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ]
    assert len({variant.fingerprint for variant in variants}) == len(variants)


@pytest.mark.parametrize("kernel", ["NORM_KERNEL", "ACTIVATION_KERNELS"])
def test_the_versions_of_our_own_kernels_are_in_the_fingerprint(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics()
    monkeypatch.setattr(f"specdec.model.numerics.{kernel}", "another v2")
    assert numerics().fingerprint != before.fingerprint


def test_where_a_model_was_loaded_from_is_not_in_the_fingerprint() -> None:
    config = tiny_model().config
    kernel = choose_kernel(CPU, torch.float16)
    before = numerics_of(config, "a", kernel=kernel, device=CPU)
    config._name_or_path = "/elsewhere"
    assert numerics_of(config, "a", kernel=kernel, device=CPU) == before


def test_the_digest_of_weights_in_memory_changes_with_one_weight() -> None:
    model = tiny_model(tie_word_embeddings=True)
    before = digest_of_parameters(model)
    assert digest_of_parameters(tiny_model(tie_word_embeddings=True)) == before
    model.model.norm.weight.data[3] += 1e-6
    assert digest_of_parameters(model) != before
