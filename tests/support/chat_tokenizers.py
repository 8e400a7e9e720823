"""Small tokenizers that hold the special tokens of released chat templates, which trl ships."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (
    "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|eom_id|>", "<|python_tag|>",
)  # fmt: skip
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GPT_OSS = (
    "<|endoftext|>", "<|startoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
    "<|return|>", "<|call|>",
)  # fmt: skip
PHI = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
# Special tokens, the first of which ends a text; and added tokens that are not special in the released files.
TOKENS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen": (QWEN, ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "llama": (LLAMA, ()),
    "deepseek": (
        DEEPSEEK,
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *(
            f"<｜tool▁{name}｜>" for name in (
                "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end",
                "output▁begin", "output▁end",
            )
        )),
    ),
    "glm": (GLM, ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")),
    "gptoss": (GPT_OSS, ()),
    "phi": (PHI, ()),
}  # fmt: skip


def released_templates() -> dict[str, Path]:
    """The templates that trl ships, by name; none without it."""
    found = find_spec("trl")
    folder = Path(found.origin).parent / "chat_templates" if found and found.origin else Path("nowhere")
    return {path.stem: path for path in sorted(folder.glob("*.jinja"))}


def released_template(name: str) -> str:
    """The text of one of them."""
    paths = released_templates()
    if not paths:
        pytest.skip("needs trl")
    return paths[name].read_text()


def build_tokenizer(family: str, template: str | None, *, trim_offsets: bool = False) -> Any:
    """Byte-level BPE with a few merges, the tokens of a family and a template."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special, added = TOKENS[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(special), special_tokens=list(special), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(["assistant\n\nSunny, I think.\n\n The weather in Rome"] * 3, trainer)
    backend.add_tokens(list(added))
    begins = {"bos_token": special[1]} if family in ("llama", "deepseek") else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], chat_template=template, **begins
    )


def marked(tokenizer: Any, document: tuple[Any, Any]) -> str:
    """The text of a document, its tokens with loss in ⟦ ⟧."""
    text = ""
    for has_loss, tokens in groupby(zip(*document, strict=True), key=lambda pair: bool(pair[1])):
        piece = tokenizer.decode([int(token) for token, _ in tokens])
        text += f"⟦{piece}⟧" if has_loss else piece
    return text


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}
