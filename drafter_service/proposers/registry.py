"""Proposers by name. Each is imported when it is asked for: a lookup drafter starts without torch."""

from collections.abc import Callable, Mapping

from drafter_service.proposers.base import Proposer
from specdec.config import DrafterSettings
from specdec.errors import ModelLoadError


def create_proposer(settings: DrafterSettings) -> Proposer:
    """Loads the proposer that the settings name. Raises ModelLoadError."""
    return _FACTORIES[settings.proposer](settings)


def _create_ngram(settings: DrafterSettings) -> Proposer:
    from drafter_service.proposers.ngram import NgramProposer

    del settings
    return NgramProposer()


def _create_draft_model(settings: DrafterSettings) -> Proposer:
    if not settings.model:
        raise ModelLoadError(f"the proposer {settings.proposer} needs a model")
    from drafter_service.proposers.draft_model import DraftModelProposer
    from specdec.model.loading import load_model

    return DraftModelProposer(
        load_model(
            settings.model,
            device=settings.device,
            dtype=settings.dtype,
            quantization=settings.quantization,
            cache_dir=settings.cache_dir,
            num_threads=settings.threads,
        )
    )


def _create_stacked(settings: DrafterSettings) -> Proposer:
    from drafter_service.proposers.stacked import StackedProposer

    return StackedProposer(_create_ngram(settings), _create_draft_model(settings))


_FACTORIES: Mapping[str, Callable[[DrafterSettings], Proposer]] = {
    "ngram": _create_ngram,
    "draft_model": _create_draft_model,
    "stacked": _create_stacked,
}
