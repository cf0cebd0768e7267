import pytest

from specdec.bench.load_plan import LoadCell, LoadPlan, made_up_prompts, parse_stream_counts
from specdec.bench.plan import Lane, PlanError, parse_lanes
from specdec.params import AcceptanceRule

NGRAM, DRAFT = Lane("ngram"), Lane("draft_model", "small", "int8")


def plan(**changes: object) -> LoadPlan:
    defaults: dict[str, object] = {
        "lanes": (NGRAM, DRAFT),
        "stream_counts": (1, 4),
        "num_repetitions": 2,
        "num_outputs": 3,
        "max_new_tokens": 16,
    }
    return LoadPlan(**{**defaults, **changes})  # type: ignore[arg-type]


def test_ways_take_turns_at_each_number_of_streams_and_the_order_swaps() -> None:
    cells = [(cell.repetition, cell.num_streams, cell.lane) for cell in plan().cells()]
    assert cells[:6] == [(0, 1, None), (0, 1, NGRAM), (0, 1, DRAFT), (0, 4, None), (0, 4, NGRAM), (0, 4, DRAFT)]
    assert cells[6:9] == [(1, 1, DRAFT), (1, 1, NGRAM), (1, 1, None)]
    assert len(cells) == 12


def test_every_way_asks_the_same_but_for_speculation() -> None:
    prompts = made_up_prompts(5, 8, 1000)
    alone = plan().spec(LoadCell(0, 4, None), 2, 1, prompts)
    drafted = plan().spec(LoadCell(0, 4, NGRAM), 2, 1, prompts)
    assert alone.prompt == drafted.prompt == prompts[7 % 5]
    assert (alone.speculation.disabled, drafted.speculation.disabled) == (True, False)
    assert alone.sampling == drafted.sampling
    assert alone.sampling.rule is AcceptanceRule.GREEDY
    assert alone.stop.ignore_end_of_sequence
    assert alone.stop.max_new_tokens == 16


def test_sampled_streams_have_seeds_of_their_own() -> None:
    sampled = plan(temperature=0.8)
    prompts = made_up_prompts(5, 8, 1000)
    specs = [sampled.spec(LoadCell(0, 4, NGRAM), stream, output, prompts) for stream in (0, 1) for output in (0, 1, 2)]
    assert [spec.sampling.seed for spec in specs] == [0, 1, 2, 3, 4, 5]
    assert {spec.sampling.rule for spec in specs} == {AcceptanceRule.COUPLED}


def test_no_two_cells_share_a_tenant() -> None:
    cells = list(plan().cells())
    assert len({cell.tenant for cell in cells}) == len(cells)


def test_made_up_prompts_are_the_same_every_time_and_within_the_vocabulary() -> None:
    prompts = made_up_prompts(3, 10, 600)
    assert prompts == made_up_prompts(3, 10, 600)
    assert all(len(prompt) == 10 and all(300 <= token_id < 600 for token_id in prompt) for prompt in prompts)


def test_numbers_of_streams_come_with_commas() -> None:
    assert parse_stream_counts("1, 8,64") == (1, 8, 64)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1,1", "5000", "-1", "a"])
def test_numbers_of_streams_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_stream_counts(text)


def test_a_synthetic_draft_model_keeps_its_commas_and_has_no_quantization() -> None:
    lanes = parse_lanes(["draft_model:synthetic:seed=1,acceptance=0.5,ngram", "stacked:synthetic:"], None, "int8")
    assert lanes == (
        Lane("draft_model", "synthetic:seed=1,acceptance=0.5"),
        Lane("ngram"),
        Lane("stacked", "synthetic:"),
    )
    assert parse_lanes(["draft_model"], "synthetic:seed=2", "int8") == (Lane("draft_model", "synthetic:seed=2"),)
