"""Templated text is taken apart where its markers have one meaning, and refused elsewhere.

The texts are what the templates of the named models write (`tokenizer_config.json` of each on the Hugging Face hub).
"""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from grmpipe.data.templated import remove_end_tokens, split_stripped, split_templated
from grmpipe.models.types import Message

LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
PROMPTS = {
    "Qwen2.5": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6 x 7?\n\nSay it.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Llama-3.1": "<|begin_of_text|>"
    + LLAMA.format("system", "Be brief.")
    + LLAMA.format("user", "6 x 7?\n\nSay it.")
    + "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "Llama-4": "<|begin_of_text|><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
    "<|header_start|>user<|header_end|>\n\n6 x 7?\n\nSay it.<|eot|><|header_start|>assistant<|header_end|>\n\n",
    "Mistral-Small-3": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]6 x 7?\n\nSay it.[/INST]",
    "Gemma-4": "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\n6 x 7?\n\nSay it.<turn|>\n<|turn>model\n",
    "Phi-3": "<|system|>\nBe brief.<|end|>\n<|user|>\n6 x 7?\n\nSay it.<|end|>\n<|assistant|>\n",
    "GLM-4": "[gMASK]<sop><|system|>\nBe brief.<|user|>\n6 x 7?\n\nSay it.<|assistant|>",
    "DeepSeek-R1": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>6 x 7?\n\nSay it.<｜Assistant｜>",
}
BRIEF = (Message(role="system", content="Be brief."), Message(role="user", content="6 x 7?\n\nSay it."))
TURNS = (
    Message(role="user", content="6 x 7?"),
    Message(role="assistant", content="41"),
    Message(role="user", content="No."),
)
EPISODES = {
    "Qwen": "<|im_start|>user\n6 x 7?<|im_end|>\n<|im_start|>assistant\n41<|im_end|>\n<|im_start|>user\n"
    "No.<|im_end|>\n<|im_start|>assistant\n",
    "Nemotron-3": "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n6 x 7?<|im_end|>\n<|im_start|>assistant\n"
    "<think></think>41<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n",
    "Gemma": "<bos><start_of_turn>user\n6 x 7?<end_of_turn>\n<start_of_turn>model\n41<end_of_turn>\n"
    "<start_of_turn>user\nNo.<end_of_turn>\n<start_of_turn>model\n",
    "Mistral-7B-v0.3": "<s>[INST] 6 x 7?[/INST] 41</s>[INST] No.[/INST]",
    "DeepSeek-R1": "<｜begin▁of▁sentence｜><｜User｜>6 x 7?<｜Assistant｜>41<｜end▁of▁sentence｜>"
    "<｜User｜>No.<｜Assistant｜>",
}


@pytest.mark.parametrize("model", PROMPTS)
def test_the_messages_of_a_prompt_are_recovered_behind_any_padding(model: str) -> None:
    for padding in ("", "<|endoftext|>" * 3, "<pad><pad>"):
        found = split_templated(padding + PROMPTS[model])
        assert found is not None
        assert (found.messages, found.begun) == (BRIEF, "")


@pytest.mark.parametrize("model", EPISODES)
def test_a_conversation_of_several_turns_is_recovered(model: str) -> None:
    found = split_templated(EPISODES[model])
    assert found is not None
    assert (found.messages, found.begun) == (TURNS, "")


@pytest.mark.parametrize(("model", "end"), [("Qwen2.5", "<|im_end|>\n<|endoftext|>"), ("Mistral-Small-3", "</s>")])
def test_a_response_behind_its_prompt_is_the_last_message_if_it_has_ended(model: str, end: str) -> None:
    whole, cut = split_templated(PROMPTS[model] + "42 \n" + end), split_templated(PROMPTS[model] + "42 \n")
    assert whole is not None
    assert cut is not None
    assert (whole.messages[:-1], whole.messages[-1].role, whole.begun) == (BRIEF, "assistant", None)
    assert whole.messages[-1].content.strip() == "42"
    assert (cut.messages, cut.begun) == (BRIEF, "42 \n")


def test_a_begun_thought_is_told_from_the_prompt() -> None:
    found = split_templated(PROMPTS["Qwen2.5"] + "<think>\n")
    assert found is not None
    assert (found.messages, found.begun) == (BRIEF, "<think>\n")


@pytest.mark.long
def test_every_template_that_trl_ships_is_taken_apart_or_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "trl==1.16.0"]
    subprocess.run(command, check=True)
    (wheel,) = (zipfile.ZipFile(path) for path in tmp_path.glob("trl-*.whl"))
    names = [
        name for name in wheel.namelist() if name.endswith(".jinja") and not re.search("llava|smolvlm|idefics", name)
    ]
    refused = set()
    for name in names:
        template = _compile_jinja_template(wheel.read(name).decode())
        turns = [{"role": one.role, "content": one.content} for one in TURNS]
        text = template.render(
            messages=turns, add_generation_prompt=True, bos_token="", eos_token="<｜end▁of▁sentence｜>"
        )
        try:
            found = split_templated(text)
        except ValueError:
            refused.add(re.split("[/_.0-9]", name.removeprefix("trl/chat_templates/"))[0])
            continue
        assert found is not None, name
        assert tuple(one for one in found.messages if one.role != "system") == TURNS, name
        assert found.begun is not None, name
    assert len(names) > 50 and refused <= {"cohere", "gptoss", "muse"}


def test_a_text_without_markers_is_none() -> None:
    assert split_templated("What is 6 x 7?") is None
    assert split_stripped("What is 6 x 7?") is None
    assert split_stripped("user\n" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Hi <|im_start|>user\nWhat?<|im_end|>\n", "expected ChatML's first marker at the beginning, found 'Hi'"),
        ("<s><|START|>Hi<|END|>", r"'<s><\|START\|>Hi<\|END\|>' has markers of none of the known templates \(ChatML"),
        ("<|im_start|>judge\nWhat?<|im_end|>\n", "judge.*ChatML has the roles system, user, assistant, tool"),
        ("<|im_start|>user\nWhat?\n<|im_start|>assistant\n", r"a message of ChatML has no <\|im_end\|>: 'What\?'"),
        ("<|im_start|>user\nWhat<|im_end|> now?<|im_end|>\n", r"stands within a message: '<\|im_end\|> now\?"),
    ],
)
def test_markers_that_no_template_writes_so_are_refused_with_a_quote(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        split_templated(text)


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("system\nBe brief.\nuser\n6 x 7?\n\nSay it.\nassistant\n", 2),
        ("user\n6 x 7?\n\nSay it.\nmodel\n", 1),
        ("system\n\nBe brief.user\n\n6 x 7?\n\nSay it.assistant\n\n", 2),
    ],
)
def test_a_prompt_without_special_tokens_is_recovered_by_the_names_of_its_roles(text: str, roles: int) -> None:
    found = split_stripped(text)
    assert found is not None
    assert (found.messages, found.begun) == (BRIEF[-roles:], "")
    begun = split_stripped(text + "<think>\n\n</think>\n\n")
    assert begun is not None
    assert (begun.messages, begun.begun) == (found.messages, "<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "text",
    [
        "user\n6 x 7?\nassistant\n41\nuser\nNo.\nassistant\n",
        "user\nWho is the\nuser\n?\nassistant\n",
        "user\n\n6 x 7?assistant\n\n41user\n\nNo.assistant\n\n",
    ],
)
def test_a_prompt_without_special_tokens_is_refused_where_a_role_may_be_text(text: str) -> None:
    with pytest.raises(ValueError, match="the special tokens are gone, and 'user' stands 2 times"):
        split_stripped(text)


def test_end_tokens_and_padding_are_removed_from_a_response_and_nothing_else() -> None:
    assert remove_end_tokens("42 \n<|im_end|>\n<|endoftext|><|endoftext|>") == "42 \n"
    assert remove_end_tokens("It was cut of \n") == "It was cut of \n"
    assert remove_end_tokens("<s>41</s>") == "<s>41</s>"
    assert remove_end_tokens("a <|im_end|> b") == "a <|im_end|> b"
    assert remove_end_tokens("<pad>" * 10_000 + "x") == "<pad>" * 10_000 + "x"
    assert remove_end_tokens("x" + "<pad>" * 10_000) == "x"
