"""A wrapped model in TRL's ``SFTTrainer``: ``torchrun --nproc-per-node 2 examples/sft_trainer.py DIR 8``

Fine-tunes a tiny Qwen3-MoE on conversations with tools, packed, with a loss on the assistant's words alone.
Run again with more steps, it goes on from its last checkpoint. ``pip install 'fsdmoe[trl]'``"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import fsdmoe

CONFIG = AutoConfig.for_model(
    "qwen3_moe", vocab_size=128, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }} "
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }} <end>{% endgeneration %}"
    "{% else %}{{ message.content }} <end>{% endif %} {% endfor %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "n7", "description": "counts", "parameters": {}},
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: a folder of yours has a tokenizer and a template of its own."""
    words = ["<pad>", "<end>", "user", "assistant", "tool", *(f"n{number}" for number in range(100))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )


def build_conversations(count: int) -> Dataset:
    """Questions of different lengths, which the answer counts on from."""

    def talk(number: int) -> dict[str, Any]:
        question = [f"n{(number + step) % 100}" for step in range(2 + number % 5)]
        answer = [f"n{(number + len(question) + step) % 100}" for step in range(1 + number % 4)]
        said = [
            {"role": "user", "content": " ".join(question)},
            {"role": "assistant", "content": " ".join(answer)},
        ]
        return {"messages": said, "tools": [TOOL]}

    return Dataset.from_list([talk(number) for number in range(count)])


def main(folder: str, steps: int) -> None:
    meshes = fsdmoe.build_meshes(ep=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = fsdmoe.parallelize(model, meshes)  # load="tutorial/model" to fine-tune
    arguments = SFTConfig(
        folder, max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, max_length=32, packing=True, assistant_only_loss=True, logging_steps=1,
        save_steps=4,
        bf16=False,  # the model's own precision, which parallelize has set
        use_cpu=meshes.device.type == "cpu", report_to="none",
    )  # fmt: skip
    trainer = fsdmoe.prepare_trainer(  # the one call
        SFTTrainer(
            model, arguments, train_dataset=build_conversations(96), processing_class=build_tokenizer()
        )
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    trainer.save_model(f"{folder}/model")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
