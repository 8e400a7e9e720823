"""Ask an exported model, with transformers alone: ``python examples/generate.py FOLDER PROMPT``

A prompt is a user's turn if the tokenizer has a chat template; else, or with ``--plain``, a text to continue.
"""

import argparse
import difflib
import logging
from pathlib import Path
from typing import Any

import transformers

_COMMAND = "python -m fsdmoe.checkpoint"


def refuse_other_folders(folder: str) -> None:
    """Adapters and runs have to become Hugging Face folders first; what is no folder here is a hub's name."""
    if Path(folder, "adapter_config.json").exists():
        raise SystemExit(
            f"{folder}: expected a Hugging Face folder, got an adapter; merge it first: "
            f"{_COMMAND} merge-adapter BASE {folder} OUT"
        )
    if Path(folder).is_dir() and not Path(folder, "config.json").exists():
        raise SystemExit(
            f"{folder}: expected a Hugging Face folder, got one without config.json; export a run or "
            f"checkpoint first: {_COMMAND} to-hf {folder} OUT, or with adapters: {_COMMAND} merge-adapter "
            f"BASE {folder} OUT"
        )
    around = Path(folder).parent
    if not Path(folder).exists() and around != Path() and around.is_dir():  # no name on the hub
        near = difflib.get_close_matches(Path(folder).name, [path.name for path in around.iterdir()], 1)
        fix = f"did you mean {around / near[0]}?" if near else "name one that is there"
        raise SystemExit(f"{folder}: expected a Hugging Face folder, found nothing there; {fix}")
    # transformers makes an empty tokenizer of such a folder, and fails far from here.
    names = ("tokenizer*", "vocab*", "*.model")
    if Path(folder).is_dir() and not any(found for name in names for found in Path(folder).glob(name)):
        raise SystemExit(
            f"{folder}: expected a tokenizer with the model, got none; name the one of its data in the "
            f"export: {_COMMAND} to-hf RUN OUT --config-from FOLDER. A model of bytes has none: print "
            "what it writes while it trains, with train.sample_prompts"
        )


def main(folder: str, prompt: str, *, plain: bool = False) -> str:
    refuse_other_folders(folder)
    for name in ("torch.utils._pytree", "torchao"):  # of torchao, which transformers loads
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        if Path(folder).is_dir():
            raise
        raise SystemExit(f"{folder}: expected a folder, or a model's name on the hub; got neither") from error
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    is_chat = bool(tokenizer.chat_template) and not plain
    kind = "its chat template" if is_chat else "a plain prompt"
    print(
        f"{folder}: {type(model).__name__}, {model.num_parameters():,} parameters, {model.dtype}, with {kind}"
    )
    if is_chat:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    answer: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(answer)
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask an exported model.")
    parser.add_argument("folder", help="a Hugging Face folder with a tokenizer")
    parser.add_argument("prompt", help="a question, or a text to continue")
    parser.add_argument("--plain", action="store_true", help="without the chat template")
    options = parser.parse_args()
    main(options.folder, options.prompt, plain=options.plain)
