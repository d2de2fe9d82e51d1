"""A position in the data is one integer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.data.stream import EndOfData, PromptStream
from grmpipe.types import Prompt


def prompts(count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(prompt_id=str(index), messages=()) for index in range(count))


def ids(stream: PromptStream, prompt_indices: range) -> list[str]:
    return [stream.at(prompt_index).prompt_id for prompt_index in prompt_indices]


@given(count=st.integers(1, 30), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_each_epoch_holds_each_prompt_once(count: int, seed: int, epoch: int) -> None:
    stream = PromptStream(prompts(count), seed=seed)
    drawn = ids(stream, range(epoch * count, (epoch + 1) * count))
    assert sorted(drawn, key=int) == [str(index) for index in range(count)]


@given(prompt_indices=st.lists(st.integers(0, 99), max_size=30))
def test_a_draw_does_not_depend_on_those_before_it(prompt_indices: list[int]) -> None:
    walked = ids(PromptStream(prompts(10), seed=3), range(100))
    jumping = PromptStream(prompts(10), seed=3)
    assert [jumping.at(prompt_index).prompt_id for prompt_index in prompt_indices] == [
        walked[prompt_index] for prompt_index in prompt_indices
    ]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    stream, other = PromptStream(prompts(50), seed=3), PromptStream(prompts(50), seed=4)
    assert len({tuple(ids(stream, range(50))), tuple(ids(stream, range(50, 100))), tuple(ids(other, range(50)))}) == 3


def test_order_of_prompts_never_changes() -> None:
    """A changed order would break every resumed run."""
    assert "".join(ids(PromptStream(prompts(10), seed=7), range(20))) == ORDER_OF_SEED_7


ORDER_OF_SEED_7 = "45981760238695073412"


def test_without_shuffling_the_order_is_the_files() -> None:
    assert ids(PromptStream(prompts(3), shuffle=False), range(5)) == ["0", "1", "2", "0", "1"]


def test_the_last_epoch_ends_the_data() -> None:
    stream = PromptStream(prompts(3), max_epochs=2)
    assert len(ids(stream, range(2 * len(stream)))) == 6
    with pytest.raises(EndOfData, match="2 epochs of 3 prompts"):
        stream.at(6)


def test_a_prompt_has_the_step_of_its_place_in_the_order() -> None:
    stream = PromptStream(prompts(5), seed=1, groups_per_step=3)
    assert [stream.at(index).step for index in (0, 2, 3, 300)] == [1, 1, 2, 101]
    assert PromptStream(prompts(5), seed=1).at(300).step is None


def test_no_prompt_is_drawn_where_there_are_none() -> None:
    with pytest.raises(AssertionError):
        PromptStream(()).at(0)
