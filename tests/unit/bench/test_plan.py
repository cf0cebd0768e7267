import json
from pathlib import Path

import pytest

from specdec.bench.plan import (
    BenchPrompt,
    Lane,
    PlanError,
    in_turn,
    parse_lanes,
    parse_take,
    read_prompts,
    select_prompts,
)

_PROMPTS = Path(__file__).resolve().parents[3] / "bench" / "prompts" / "dev.jsonl"


def test_proposers_come_with_commas_or_again_and_fill_in_the_defaults() -> None:
    lanes = parse_lanes(["draft_model::none,ngram", "stacked", "draft_model:other:int4"], "small", "int8")
    assert lanes == (
        Lane("draft_model", "small", "none"),
        Lane("ngram"),
        Lane("stacked", "small", "int8"),
        Lane("draft_model", "other", "int4"),
    )
    assert [lane.label for lane in lanes][:2] == ["draft_model:small:none", "ngram"]


@pytest.mark.parametrize(
    "text", ["", "medusa", "ngram:small", "draft_model", "stacked:small:int2", "stacked:a:int8:b", "ngram,ngram"]
)
def test_proposers_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_lanes([text], None, "int8")


@pytest.mark.parametrize("texts", [["code"], ["code=x"], ["=3"], ["code=-1"], ["code=1", "code=2"]])
def test_selections_that_make_no_sense_are_refused(texts: list[str]) -> None:
    with pytest.raises(PlanError):
        parse_take(texts)


def test_selection_takes_the_first_of_each_category_and_other_stands_for_the_rest() -> None:
    chosen = select_prompts(read_prompts(_PROMPTS), parse_take(["code=8", "qa=0", "other=2"]))
    counts: dict[str, int] = {}
    for prompt in chosen:
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
    assert counts.pop("code") == 8
    assert "qa" not in counts
    assert len(counts) == 12
    assert set(counts.values()) == {2}
    assert [prompt.prompt_id for prompt in chosen if prompt.category == "code"][:2] == ["humaneval-0", "humaneval-2"]


def test_an_early_end_leaves_prompts_of_every_category() -> None:
    prompts = [BenchPrompt(f"{category}{number}", category, "") for category in "ab" for number in range(2)]
    assert [prompt.prompt_id for prompt in select_prompts(prompts, {"other": 2})] == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize("take", [{"cooking": 1}, {"code": 21}, {"code": 0}])
def test_a_selection_that_the_file_cannot_fill_is_refused(take: dict[str, int]) -> None:
    with pytest.raises(PlanError):
        select_prompts(read_prompts(_PROMPTS), take)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "category": "b", "turns": ["c"]}) + "\n" + json.dumps({"id": "a"}) + "\n")
    with pytest.raises(PlanError, match="line 2"):
        read_prompts(path)


def test_order_is_swapped_at_every_other_prompt() -> None:
    assert [list(in_turn(["off", "on"], index)) for index in range(3)] == [["off", "on"], ["on", "off"], ["off", "on"]]
