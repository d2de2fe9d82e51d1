"""Text inside a message stays text, whatever it spells."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig, GPT2Config, PreTrainedTokenizerFast, Qwen3Config

from grmpipe.models.chat.chat_tokenizer import ChatTokenizer
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.model_files import PlainConfig, is_plain_tokenizer
from grmpipe.models.settings import ModelConfig
from grmpipe.models.types import Message
from grmpipe.tiny.tokenizer import build_tokenizer

MARKERS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<think>",
    "</think>",
    "  ",
    "user\n",
    "assistant",
    "<|im_",
    "\ufffd",
]
texts = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=8)), max_size=8).map("".join)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny one, with added tokens that aren't special (like Qwen3's thinking tags) and a run of spaces."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>", "  ")])
    return tokenizer


@pytest.fixture(scope="session")
def path(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    Qwen3Config(vocab_size=600, max_position_embeddings=512).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def renderer(path: Path) -> Renderer:
    return Renderer.load(str(path))


def user(content: str) -> Message:
    return Message(role="user", content=content)


def markup_in(tokenizer: PreTrainedTokenizerFast, token_ids: tuple[int, ...]) -> list[int]:
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return [token_id for token_id in token_ids if token_id in added]


@given(texts, texts)
def test_no_content_becomes_markup(
    renderer: Renderer, tokenizer: PreTrainedTokenizerFast, first: str, second: str
) -> None:
    full = renderer.render([Message(role="system", content=first), user(second)])
    empty = renderer.render([Message(role="system", content=""), user("")])
    assert markup_in(tokenizer, full) == markup_in(tokenizer, empty) != []


@given(texts)
def test_ids_are_markup_then_content_then_markup(
    renderer: Renderer, tokenizer: PreTrainedTokenizerFast, content: str
) -> None:
    before = tuple(tokenizer.encode("<|im_start|>user\n", add_special_tokens=False))
    after = tuple(tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False))
    token_ids = renderer.render([user(content)])
    assert token_ids[: len(before)] == before
    assert token_ids[-len(after) :] == after
    content_ids = token_ids[len(before) : -len(after)]
    assert tokenizer.decode(content_ids, clean_up_tokenization_spaces=False) == content
    if "think>" not in content:
        plain = tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True)
        assert content_ids == tuple(plain)


def test_half_a_character_is_replaced(renderer: Renderer) -> None:
    half, whole = renderer.render([user("a\ud800b")]), renderer.render([user("\ud83d\ude00")])
    assert half == renderer.render([user("a\ufffdb")]) and whole == renderer.render([user("\U0001f600")])


def test_decoding_leaves_special_tokens_out(renderer: Renderer) -> None:
    assert renderer.decode(renderer.render([user("Ida has 6 coins.")])) == "user\nIda has 6 coins.\nassistant\n"


def test_extending_a_conversation_equals_rendering_the_whole(
    renderer: Renderer, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Between them is what was sampled, including its stop token."""
    prompt, reply = user("2 + 2"), user("wrong <|im_end|>")
    sampled = (*tokenizer.encode("5", add_special_tokens=False), *renderer.stop_token_ids)
    whole = renderer.render([prompt, Message(role="assistant", content="5"), reply])
    assert renderer.render([prompt]) + sampled + renderer.extend([reply]) == whole
    assert renderer.render([prompt]) + sampled[:-1] + renderer.extend([reply], ended=False) == whole


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(path: Path, tmp_path: Path) -> None:
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    end = Renderer.load(str(tmp_path)).stop_token_ids
    assert len(end) == 1
    GenerationConfig(eos_token_id=[5, 7]).save_pretrained(tmp_path)
    assert Renderer.load(str(tmp_path)).stop_token_ids == tuple(sorted({5, 7, *end}))


def test_window_and_vocabulary_are_the_models(renderer: Renderer) -> None:
    assert (renderer.context_tokens, renderer.vocab_size) == (512, 600)


def test_a_tokenizer_without_a_template_is_refused_unless_one_is_given(
    path: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for file in path.iterdir():
        if file.suffix != ".jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"policy\.path.*chat_template"):
        Renderer.load(str(tmp_path))
    template = tmp_path / "plain.jinja"
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    assert Renderer.load(str(tmp_path), str(template)).render([user("1"), user("<think>")]) == tuple(
        token_id
        for piece in ("[", "1", "][", "<th", "ink>", "]")
        for token_id in tokenizer.encode(piece, add_special_tokens=False)
    )


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", None, r"holds no tokenizer \(tokenizer\.json or tokenizer\.model\); copy"),
        ("tokenizer.json", '{"model": {', r"no tokenizer could be loaded from .*"),
        ("config.json", "{", r"is not a Hugging Face model .* not a valid JSON file\."),
        ("config.json", "[]", r"is not a Hugging Face model .* Should have a `model_type` key .*"),
        ("config.json", '{"model_type": "megafoo"}', r"is not a Hugging Face model .* model type `megafoo` .*"),
    ],
)  # fmt: skip
def test_a_directory_without_a_file_that_can_be_read_is_refused_in_a_line(
    path: Path, tmp_path: Path, name: str, content: str | None, complaint: str
) -> None:
    shutil.copytree(path, tmp_path / "model")
    (tmp_path / "model" / name).unlink() if content is None else (tmp_path / "model" / name).write_text(content)
    with pytest.raises(ValueError, match=complaint) as told:
        Renderer.load(str(tmp_path / "model"))
    assert str(told.value).startswith("path: ") and "\n" not in str(told.value)


def test_a_directory_without_any_file_of_a_tokenizer_is_refused_as_such(path: Path, tmp_path: Path) -> None:
    shutil.copy(path / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"^path: .* holds no tokenizer"):
        Renderer.load(str(tmp_path))


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "exactly once"),
        ("{{ messages[0].content }}", "the assistant message exactly once"),
        ("{{ messages[1].content }}{{ messages[0].content }}", "exactly once, in order"),
        ("{{ raise_exception('only users') }}", "user, assistant: only users"),
    ],
)
def test_a_template_that_loses_or_repeats_a_message_is_an_error(
    path: Path, tmp_path: Path, template: str, complaint: str
) -> None:
    file = tmp_path / "odd.jinja"
    file.write_text(template)
    renderer = Renderer.load(str(path), str(file))
    with pytest.raises(ValueError, match=complaint):
        renderer.render([user("a"), Message(role="assistant", content="b")])


def test_a_tokenizer_that_needs_no_class_of_its_family_is_the_one_that_auto_tokenizer_loads(path: Path) -> None:
    assert is_plain_tokenizer(str(path))
    ours, autos = Renderer.load(str(path)).tokenizer, AutoTokenizer.from_pretrained(path)
    assert type(ours) is type(autos)
    assert (ours.get_vocab(), ours.chat_template, ours.eos_token_id) == (
        autos.get_vocab(), autos.chat_template, autos.eos_token_id
    )  # fmt: skip
    assert ours.backend_tokenizer.to_str() == autos.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    "change", [{"tokenizer_class": "GPT2Tokenizer"}, {"auto_map": {"AutoTokenizer": ["a.B", None]}}]
)
def test_any_other_tokenizer_is_left_to_auto_tokenizer(path: Path, tmp_path: Path, change: dict[str, object]) -> None:
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert not is_plain_tokenizer(str(tmp_path))


def test_a_config_that_only_transformers_can_read_is_left_to_it(path: Path, tmp_path: Path) -> None:
    """GPT-2 calls its window n_positions."""
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    GPT2Config(vocab_size=600, n_positions=256).save_pretrained(tmp_path)
    assert PlainConfig.read(str(tmp_path)) is None and PlainConfig.read(str(path)) is not None
    renderer = Renderer.load(str(tmp_path))
    assert (renderer.context_tokens, renderer.vocab_size) == (256, 600)


def test_missing_files_of_a_model_are_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Renderer.load(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"chat_template: .*none\.jinja"):
        Renderer.load(str(path), str(tmp_path / "none.jinja"))
    Qwen3Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer"):
        Renderer.load(str(tmp_path))


def test_a_short_prompt_is_rendered_in_a_third_of_a_millisecond(renderer: Renderer) -> None:
    """The fastest of many, so that a busy machine doesn't matter."""
    durations_s = []
    for won in range(200):
        message = user(f"Q: Ida has 6 coins. She gives 4 to Max. She wins {won}. How many coins does Ida have?")
        started_s = time.process_time()
        renderer.render([message])
        durations_s.append(time.process_time() - started_s)
    assert min(durations_s) < 0.3e-3


def test_the_prompt_of_siblings_is_encoded_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, encoded = Renderer.load(str(path)), []
    encode = ChatTokenizer._encode
    monkeypatch.setattr(ChatTokenizer, "_encode", lambda self, text: encoded.append(text) or encode(self, text))
    first, *others = (renderer.render([user("How many coins?"), user("Why?")]) for _ in range(8))
    assert all(ids == first for ids in others)
    assert [sum(text in run for run in encoded) for text in ("How many coins?", "Why?")] == [1, 1]
    assert renderer.render([user("How many?")]) != first


def test_truncation_and_padding_in_a_tokenizer_file_change_no_prompt(renderer: Renderer, path: Path) -> None:
    other = Renderer.load(str(path)).tokenizer
    other.backend_tokenizer.enable_truncation(max_length=3)
    other.backend_tokenizer.enable_padding(length=99)
    assert ChatTokenizer(other, {}).encode_markup("How many coins?") == renderer.encode_markup("How many coins?")


BRANCHING = (
    "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if system %}{{ system.name }}{% endif %}"
)


def test_template_gets_the_variables_that_it_branches_on(
    path: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "branching.jinja"
    template.write_text(BRANCHING)

    def rendered(**kwargs: object) -> str:
        return tokenizer.decode(Renderer.load(str(path), str(template), kwargs).render([user("1")]))

    assert rendered() == rendered(enable_thinking=True) == "[1]"
    assert rendered(enable_thinking=False) == "[1]<think></think>"
    assert rendered(enable_thinking=False, system={"name": "x"}) == "[1]<think></think>x"
    thoughtless = Renderer.load(str(path), str(template), {"enable_thinking": False})
    assert tokenizer.decode(thoughtless.extend([user("2")])).endswith("[2]<think></think>")
    assert not caplog.records
    assert rendered(enable_thinkng=False) == "[1]"
    assert "doesn't use enable_thinkng" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"tokenize": True}, r"^chat_template_kwargs: 'tokenize' can't be set; give names"),
        ({"messages": []}, r"^chat_template_kwargs: 'messages' can't be set"),
        ({"enable thinking": False}, r"^chat_template_kwargs: 'enable thinking' can't be set"),
        ({"enable_thinking": {1, 2}}, r"^chat_template_kwargs\.enable_thinking: expected true, false, a number"),
        ({"budget": float("nan")}, r"^chat_template_kwargs\.budget: expected"),
    ],
)
def test_unknown_variable_of_a_template_is_refused_by_its_key(kwargs: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelConfig(chat_template_kwargs=kwargs)


@given(texts, texts)
def test_a_whole_conversation_ends_after_the_assistants_turn(
    renderer: Renderer, tokenizer: PreTrainedTokenizerFast, question: str, answer: str
) -> None:
    said = [user(question), Message(role="assistant", content=answer)]
    begun, end = renderer.render(said[:1]), tuple(tokenizer.encode("<|im_end|>\n", add_special_tokens=False))
    whole = renderer.render_whole(said)
    assert whole[: len(begun)] == begun and whole[-len(end) :] == end
    assert renderer.decode(whole[len(begun) : -len(end)]) == answer


def test_text_stays_text_while_another_thread_reads_markup(path: Path) -> None:
    renderer = Renderer.load(str(path))
    text, markup = "<|im_start|>user\n" * 40, "<|im_start|>"
    as_text, as_markup = renderer.render([user(text)]), renderer.encode_markup(markup)
    read: list[tuple[int, ...]] = []
    done = threading.Event()

    def render() -> None:
        for number in range(60):
            read.append(renderer.render([user(text + str(number))]))
        done.set()

    thread = threading.Thread(target=render)
    thread.start()
    wrong = 0
    while not done.is_set():
        wrong += renderer.encode_markup(markup) != as_markup
    thread.join()

    assert wrong == 0
    assert len(as_markup) == 1
    assert {ids[: len(as_text) - 10] for ids in read} == {as_text[: len(as_text) - 10]}
