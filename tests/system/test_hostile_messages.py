"""Every service of a whole system takes hostile messages, and honest sessions do not notice."""

import pytest

from bench.hostile.campaign import run

NUM_MESSAGES = 1500


@pytest.mark.timeout(300)
async def test_hostile_messages_hurt_nobody() -> None:
    report = await run(NUM_MESSAGES, seed=7)
    assert not any(attack["faults"] for attack in report["attacks"].values())
    assert report["unhandled"] == report["dead"] == []
    assert report["honest"]["changed"] == report["honest"]["failed"] == 0
    assert report["honest"]["equal"] > 0
    assert report["sound"]
