"""The tokenizer of the tiny models: byte-level BPE with a ChatML-like template."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grmpipe.tiny.examples import Said, tokenizer_corpus

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
# Tools are listed first, by their names and the names of their parameters: "add(a, b)". A call is a line of its own,
# "add( 32, 9)": with the space, a number is the same token as in a problem. Arguments in the tool's own order have no
# names.
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools' }}"
    "{%- for tool in tools %}"
    "{{ '\\n' + tool.function.name + '(' + (tool.function.parameters.properties or {}) | join(', ') + ')' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{ ('\\n' if message['content'] or not loop.first else '') + call.function.name + '(' }}"
    "{%- set order = namespace(names=[]) %}"
    "{%- for tool in tools or [] if tool.function.name == call.function.name %}"
    "{%- set order.names = (tool.function.parameters.properties or {}) | list %}"
    "{%- endfor %}"
    "{%- set in_order = call.function.arguments | list == order.names[:call.function.arguments | length] %}"
    "{%- for name, value in call.function.arguments.items() %}"
    "{{ ('' if loop.first else ',') + ' ' + ('' if in_order else name + '=') + value | tojson }}"
    "{%- endfor %}{{ ')' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A word or a number of up to two digits includes the space before it, so that " 12" is one token.
WORDS = r" ?\d{1,2}| ?\p{L}+|\s?[^\s\p{L}\d]|\s"
MAX_VOCABULARY = 512
MAX_POSITIONS = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the texts of the examples; any other text falls back to bytes. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def encode_prompt(tokenizer: PreTrainedTokenizerFast, content: str) -> list[int]:
    """One user message, up to the assistant's turn. Content can't spell a special token."""
    return encode_opening(tokenizer, [Said(role="user", text=content)])


def encode_content(tokenizer: PreTrainedTokenizerFast, content: str) -> list[int]:
    ids: list[int] = tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True)
    return ids


def encode_markup(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def encode_message(tokenizer: PreTrainedTokenizerFast, message: Said, *, is_first: bool) -> tuple[list[int], list[int]]:
    """The markup before a message, then its content with the end of turn."""
    before = f"{TURN_START}{message.role}\n"
    content = [*encode_content(tokenizer, message.text), *encode_markup(tokenizer, TURN_END)]
    return encode_markup(tokenizer, before if is_first else f"\n{before}"), content


def encode_opening(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Said]) -> list[int]:
    """Messages, up to the assistant's turn."""
    ids: list[int] = []
    for message in messages:
        before, content = encode_message(tokenizer, message, is_first=not ids)
        ids += [*before, *content]
    return [*ids, *encode_markup(tokenizer, f"\n{TURN_START}assistant\n")]
