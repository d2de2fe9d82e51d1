"""Demonstrations: TRL's columns, the policy's own tokens, and an order that depends on the step alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grmpipe.data.demonstrations import Demonstrations, load_demonstrations, make_sample
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.types import Message
from grmpipe.tiny.resolve import resolve_model

ASKED, ANSWERED = {"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "5"}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(resolve_model("tiny://policy"))


def file_of(folder: Path, *rows: object) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_all_of_trls_forms_mean_the_same_conversation(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        {"prompt": "2 + 3", "completion": "5"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"messages": [ASKED, ANSWERED]},
    )
    assert len(set(load_demonstrations(path))) == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 3"}, r"line 2: expected the field messages, or .* prompt and completion; its fields: prompt"),
        ({"prompt": "2", "completion": "5", "messages": [ASKED, ANSWERED]}, "its fields: prompt, completion, messages"),
        ({"messages": [ASKED]}, "that an assistant's message ends .* its roles: user"),
        ({"messages": [ANSWERED]}, "another one begins; its roles: assistant"),
        ({"messages": "2 + 3"}, r"messages: expected a list of \{role, content\}, got '2 \+ 3'"),
        ({"prompt": "2", "completion": ""}, r"completion: expected a text that isn't empty"),
        ({"prompt": "2", "completion": [{"role": "tool", "content": "5"}]}, r"completion\[0\]\.role: expected one of"),
    ],
)
def test_a_row_that_is_no_demonstration_is_named(row: object, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=expected):
        load_demonstrations(file_of(tmp_path, {"prompt": "2 + 3", "completion": "5"}, row))


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no demonstrations; a line looks like"):
        load_demonstrations(file_of(tmp_path))


def test_what_assistants_say_is_trained_with_the_end_of_their_turn_after_the_policys_own_prompt(
    renderer: Renderer,
) -> None:
    first, second = Message(role="user", content="2 + 3"), Message(role="user", content="and 4 + 4")
    said = [Message(role="assistant", content=text) for text in ("it is 5", "it is 8")]
    sample = make_sample((first, said[0], second, said[1]), renderer, "d")
    trained = [token for token, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True) if is_trained]
    stop = renderer.stop_token_ids[0]
    assert trained == [*renderer.encode_markup("it is 5"), stop, *renderer.encode_markup("it is 8"), stop]
    prompt = renderer.render((first,))
    assert sample.token_ids[: len(prompt)] == prompt and not any(sample.loss_mask[: len(prompt)])
    assert sample.token_ids == (
        *prompt, *renderer.encode_markup("it is 5"), stop, *renderer.extend((second,)),
        *renderer.encode_markup("it is 8"), stop,
    )  # fmt: skip


def test_each_epoch_holds_every_demonstration_once_and_a_step_depends_on_nothing_else(renderer: Renderer) -> None:
    rows = tuple(
        (Message(role="user", content=str(number)), Message(role="assistant", content="x")) for number in range(6)
    )
    shown = Demonstrations(rows, renderer, seed=1)
    steps = [[sample.group_id for sample in shown.draw(update, 4)] for update in range(6)]
    flat = [name for step in steps for name in step]
    assert [sorted(flat[begin : begin + 6]) for begin in range(0, 24, 6)] == [sorted(set(flat))] * 4
    assert len({tuple(flat[begin : begin + 6]) for begin in range(0, 24, 6)}) > 1
    again = Demonstrations(rows, renderer, seed=1)
    assert [sample.group_id for sample in again.draw(4, 4)] == steps[4]
    assert sum(sum(sample.advantages) for sample in shown.draw(3, 4)) == pytest.approx(1.0)


def test_one_that_the_window_cannot_hold_is_left_out_and_named(
    renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    fits = (Message(role="user", content="1"), Message(role="assistant", content="x"))
    long = (Message(role="user", content="1 " * renderer.context_tokens), Message(role="assistant", content="x"))
    drawn = Demonstrations((fits, long), renderer).draw(0, 2)
    assert [sample.group_id for sample in drawn] == ["demonstration 1"]
    assert sum(drawn[0].advantages) == pytest.approx(1.0)
    assert "algorithm.sft.path: demonstration 2 has" in caplog.text
