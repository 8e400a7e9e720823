"""A Hugging Face folder to try things with, made without a download: a Qwen3-MoE of half a million random
weights, with a tokenizer and a chat template.

``python examples/make_tiny_model.py FOLDER`` writes what ``from_pretrained`` reads from a released model:
``config.json``, ``model.safetensors``, ``tokenizer.json`` and ``tokenizer_config.json``.
"""

import json
import logging
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML, the markup of Qwen and many others.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE whose few merges come from this file: it can write any text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([__file__], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
    )


def refuse_other_models(folder: str) -> None:
    """``save_pretrained`` deletes the weights that it finds in a folder."""
    path = Path(folder, "config.json")
    if path.exists() and json.loads(path.read_text()).get("vocab_size") != VOCAB_SIZE:
        sys.exit(
            f"{folder}: expected no folder, or one that this script made, got another model; name another"
        )


def main(folder: str) -> None:
    refuse_other_models(folder)
    for name in ("torch.utils._pytree", "torchao"):  # of torchao, which transformers loads
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        head_dim=16, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_experts=8,
        num_experts_per_tok=2, max_position_embeddings=512, output_router_logits=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/make_tiny_model.py FOLDER")
    main(sys.argv[1])
