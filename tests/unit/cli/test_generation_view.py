import dataclasses

import pytest

from specdec.cli.answer import collect
from specdec.cli.generation_view import DraftView
from tests.unit.cli.frames import STARTED, finished, stream


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("REQUESTED", "speculation was off: the request said so"),
        (
            "DOES_NOT_PAY",
            "speculation was off: drafts do not pay at this load, or it was not known yet whether they do",
        ),
        ("OF_A_LATER_SERVER", "speculation was off: OF_A_LATER_SERVER"),
    ],
)
async def test_who_asked_to_see_drafts_is_told_in_words_why_there_were_none(
    reason: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    end = finished()
    end = dataclasses.replace(end, speculative=dataclasses.replace(end.speculative, disabled_reason=reason))
    DraftView(no_color=True).close(await collect(stream([STARTED, end])))
    assert words in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("num_failovers", "words"), [(1, "once"), (2, "2 times")])
async def test_who_asked_to_see_drafts_is_told_that_verifiers_changed(
    num_failovers: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    end = dataclasses.replace(finished(), num_failovers=num_failovers, numerics_changed=True)
    DraftView(no_color=True).close(await collect(stream([STARTED, end])))
    *_, moved, numerics = capsys.readouterr().out.splitlines()
    assert moved == f"went on at another verifier {words}"
    assert numerics == "verifiers of different numerics decided it: one alone might have said otherwise"
