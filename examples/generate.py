"""Ask an exported model, with transformers alone: ``python examples/generate.py FOLDER QUESTION``"""

import sys
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, question: str) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    answer: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(answer)
    return answer


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/generate.py FOLDER QUESTION")
    main(sys.argv[1], sys.argv[2])
