"""The tokenizer of the tiny models: byte-level BPE with a ChatML-like template. Holds no weights."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.tiny.sft_examples import tokenizer_corpus

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
BEFORE_CONTENT = f"{TURN_START}user\n"
AFTER_CONTENT = f"{TURN_END}\n{TURN_START}assistant\n"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
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
    return [
        *tokenizer.encode(BEFORE_CONTENT, add_special_tokens=False),
        *encode_content(tokenizer, content),
        *tokenizer.encode(AFTER_CONTENT, add_special_tokens=False),
    ]


def encode_content(tokenizer: PreTrainedTokenizerFast, content: str) -> list[int]:
    return tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True)
