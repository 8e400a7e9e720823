"""Mistakes that users of other tools, and of this one, make, each with the answer it deserves.

The list was written before the answers were looked at. ``tests/behaviour/test_typical_mistakes.py`` gives
each to two ranks and reads the first line that is not the launcher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Typical:
    """A mistake on top of a tiny run with eight experts, and what the first line has to name."""

    arguments: str
    """What is written after ``train.py --config run.toml``."""
    key: str
    """The key, option or variable that the line is about."""
    fix: str
    """What to do instead: the line holds these words."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """What is in the folder, by name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of ranks that are started by hand, without a launcher; ``{port}`` stands for a free port,
    ``{busy}`` for one that somebody listens on."""
    second: str = ""
    """What rank 1 gets after its arguments, and rank 0 does not. By hand too."""


ONE_TEXT = {"corpus.txt": "Nobody reads this text, and that is as it should be. " * 400}

GROUPS = """
precision.param_dtype = "float32"
data = {seq_len = 32, max_bytes = 20000}
train = {steps = 2, global_batch_size = 4, micro_batch_size = 1}
optim.groups = [{params = ["embedding.*"], lr = 1e-4}]
"""

KEYS = {
    # Names of other tools.
    "top_k": Typical("--model.top_k 2", "model.top_k", "model.num_experts_per_tok"),
    "lr alone": Typical("--lr 1e-4", "--lr", "optim.lr"),
    "learning_rate alone": Typical("--learning_rate 1e-4", "--learning_rate", "optim.lr"),
    "learning_rate in optim": Typical("--optim.learning_rate 1e-4", "optim.learning_rate", "optim.lr"),
    "dtype alone": Typical("--dtype bfloat16", "--dtype", "precision.param_dtype"),
    "dtype of the model": Typical("--model.dtype bfloat16", "model.dtype", "precision.param_dtype"),
    "dp alone": Typical("--dp 2", "--dp", "mesh.dp_shard"),
    "dp in mesh": Typical("--mesh.dp 2", "mesh.dp", "mesh.dp_shard"),
    "batch_size": Typical("--train.batch_size 8", "train.batch_size", "train.global_batch_size"),
    "max_steps": Typical("--max_steps 100", "--max_steps", "train.steps"),
    "epochs": Typical("--train.epochs 3", "train.epochs", "train.steps"),
    "expert_parallel": Typical("--mesh.expert_parallel 2", "mesh.expert_parallel", "mesh.ep"),
    "n_layers": Typical("--model.n_layers 2", "model.n_layers", "model.num_hidden_layers"),
    "d_model": Typical("--model.d_model 64", "model.d_model", "model.hidden_size"),
    "n_heads": Typical("--model.n_heads 4", "model.n_heads", "model.num_attention_heads"),
    "accumulation": Typical(
        "--train.gradient_accumulation_steps 4",
        "train.gradient_accumulation_steps",
        "mean train.global_batch_size (rows a step: train.micro_batch_size x",
    ),
    "max_length": Typical("--data.max_length 64", "data.max_length", "data.seq_len"),
    "max_grad_norm": Typical("--optim.max_grad_norm 1.0", "optim.max_grad_norm", "optim.grad_clip"),
    "activation checkpointing": Typical(
        "--train.gradient_checkpointing true", "train.gradient_checkpointing", "memory.recompute"
    ),
    "r of LoRA": Typical("--lora.r 8", "--lora.r", "adapter.rank"),
    "bf16 as a switch": Typical("--bf16", "--bf16", "precision.param_dtype"),
    "resume": Typical(
        "--resume_from_checkpoint runs/x", "--resume_from_checkpoint", "checkpoint.load (or --resume"
    ),
    # Names that are nearly right, and sections that are not.
    "--confg": Typical("--confg other.toml", "--confg", "--config"),
    "one dash": Typical("-train.steps 5", "-train.steps", "--train.steps"),
    "weightdecay": Typical("--optim.weightdecay 0.1", "optim.weightdecay", "optim.weight_decay"),
    "a key of another section": Typical("--train.warmup_steps 5", "train.warmup_steps", "optim.warmup_steps"),
    "output-dir": Typical("--output-dir runs/x", "--output-dir", "train.output_dir"),
    "save_interval": Typical(
        "--checkpoint.save_interval 5", "checkpoint.save_interval", "checkpoint.interval"
    ),
    "the launcher's option": Typical("--nproc-per-node 2", "--nproc-per-node", "before train.py"),
    # In files.
    "a section called training": Typical(
        "--config own.toml", "training", "[train]", {"own.toml": "[training]\nsteps = 5\n"}
    ),
    "a section called optimizer": Typical(
        "--config own.toml", "optimizer", "[optim]", {"own.toml": "[optimizer]\nlr = 1e-3\n"}
    ),
    "a key above all sections": Typical(
        "--config own.toml", "steps", "[train]", {"own.toml": "steps = 5\n"}
    ),
    "a word without quotes": Typical(
        "--config own.toml", "--config", "line 2", {"own.toml": "[model]\npreset = quickstart\n"}
    ),
}  # fmt: skip

VALUES = {
    "bf16 for bfloat16": Typical("--precision.param_dtype bf16", "precision.param_dtype", "mean bfloat16"),
    "fp16 for float16": Typical("--precision.param_dtype fp16", "precision.param_dtype", "mean float16"),
    "a power for a whole number": Typical("--train.steps 1e3", "train.steps", "1000"),
    "adam": Typical("--optim.name adam", "optim.name", "adamw"),
    "yes": Typical("--fsdp.cpu_offload yes", "fsdp.cpu_offload", "true"),
    "zero3": Typical("--fsdp.shard zero3", "fsdp.shard", "params"),
    "a preset without its end": Typical("--model.preset qwen3-30b", "model.preset", "qwen3-30b-a3b"),
    "more experts a token than there are": Typical(
        "--model.num_experts_per_tok 9", "model.num_experts_per_tok", "8"
    ),
    "ep that does not divide": Typical("--mesh.ep 3", "mesh.ep", "2"),
    "ep above the ranks": Typical("--mesh.ep 8", "mesh.ep", "--nproc-per-node 8"),
    "a batch that does not divide": Typical("--train.global_batch_size 3", "train.global_batch_size", "4"),
    "a negative rate": Typical("--optim.lr -1e-4", "optim.lr", "above 0"),
    "graphs on a CPU": Typical("--train.graphs layer", "train.graphs", '"none"'),
    "a model far too large for this host": Typical(
        "--model.preset deepseek-v3", "model.preset", "--dry-run"
    ),
}  # fmt: skip

PATHS = {
    "an array of records": Typical(
        "--data.kind jsonl --data.path a.json", "data.path", "write one object a line",
        {"a.json": '[{"text": "one"}, {"text": "two"}]'},
    ),
    "ids outside of the vocabulary": Typical(
        "--data.kind tokens --data.path a.bin --data.max_bytes none", "data.vocab_size",
        "model.vocab_size to 4097 or more",
        {"a.bin": b"\x00\x10" * 5000},
    ),
    "prose for records": Typical(
        "--data.kind jsonl --data.path notes.txt", "data.path", 'set data.kind = "text" if it is prose',
        {"notes.txt": "Nobody reads this.\nAnd that is as it should be.\n"},
    ),
    "tokens of another width": Typical(
        "--data.kind tokens --data.path a.bin --data.dtype uint32 --data.max_bytes none", "data.dtype",
        "set it to uint16",
        {"a.bin": b"\x00\x01" * 5001},
    ),
    "a group that matches nothing": Typical(
        "--config own.toml", "optim.groups[0].params", "did you mean '*embed_tokens*'?", {"own.toml": GROUPS}
    ),
    "a slip in the file's name": Typical("--config run.tml", "--config", "run.toml"),
    "a slip in the name of the data": Typical(
        "--data.kind text --data.path corpsu.txt", "data.path", "corpus.txt", ONE_TEXT
    ),
    "data without its kind": Typical("--data.path corpus.txt", "data.path", "data.kind", ONE_TEXT),
    "a record with another field": Typical(
        "--data.kind jsonl --data.path a.jsonl", "data.field", "content",
        {"a.jsonl": '{"content": "one"}\n' * 50},
    ),
    "a model by its name on the Hub": Typical("--model.hf Qwen/Qwen3-30B-A3B", "model.hf", "hf download"),
    "a tokenizer by its name on the Hub": Typical(
        "--data.tokenizer gpt2", "data.tokenizer", "tokenizer.json"
    ),
    "a tokenizer of SentencePiece": Typical(
        "--data.tokenizer tokenizer.model", "data.tokenizer", "tokenizer.json",
        {"tokenizer.model": b"\x0a\x0e"},
    ),
    "a checkpoint that is not there": Typical("--checkpoint.load last", "checkpoint.load", "latest"),
    "a file where a folder should be": Typical(
        "--train.output_dir taken", "train.output_dir", "name another", {"taken": ""}
    ),
}  # fmt: skip

HOSTS = {
    "a host without an address": Typical(
        "", "MASTER_ADDR", "host",
        environment={"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "{port}"},
    ),
    "a port that is taken": Typical(
        "", "MASTER_PORT", "another", environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{busy}"}
    ),
    "ranks with other settings": Typical(
        "", "optim.lr", "same command line",
        environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}, second="--optim.lr 1e-5",
    ),
    "a disk that is full at a save": Typical(
        "--checkpoint.interval 2", "train.output_dir", "free some, or name another checkpoint.folder"
    ),
}  # fmt: skip

AT_FIRST_USE = {
    "pp": Typical("--mesh.pp 2", "mesh.pp", "there is no pipeline parallelism; raise mesh.ep"),
    "wandb_project": Typical(
        "--wandb_project foo", "--wandb_project", 'observe.project (with observe.loggers = ["wandb"])'
    ),
    "fp8 weights": Typical(
        "--precision.param_dtype fp8", "precision.param_dtype", 'precision.recipe = "fp8_blockwise"'
    ),
    "a linear schedule": Typical("--optim.schedule linear", "optim.schedule", "optim.decay_fraction = 1"),
    "full recomputation": Typical("--memory.recompute full", "memory.recompute: ", "did you mean layer?"),
    "a comma in a number": Typical("--optim.lr 0,001", "optim.lr", "write 0.001, which has no comma"),
    "a number in quotes": Typical(
        "--config own.toml", "train.steps", "write 100, without quotes",
        {"own.toml": '[train]\nsteps = "100"\n'},
    ),
    "experts that ep does not divide": Typical(
        "--model.num_experts 7 --mesh.ep 2", "mesh.ep", "choose 1, or another model.num_experts"
    ),
    "Megatron's auxiliary loss": Typical(
        "--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff", "experts.balance.micro_batch"
    ),
    "Megatron's recomputation": Typical(
        "--recompute-granularity full", "--recompute-granularity", 'memory.recompute = ["layer"]'
    ),
    "torchtitan's schedule": Typical(
        "--config own.toml", "lr_scheduler", "warmup_steps is optim.warmup_steps",
        {"own.toml": "[lr_scheduler]\nwarmup_steps = 5\n"},
    ),
    "axolotl's datasets": Typical(
        "--config own.toml", "datasets", "[[data.sources]]",
        {"own.toml": '[[datasets]]\npath = "a.jsonl"\ntype = "alpaca"\n'},
    ),
    "DeepSpeed's offload": Typical(
        "--config own.toml", "zero_optimization", "fsdp.cpu_offload = true, or optim.state_offload",
        {"own.toml": '[zero_optimization.offload_optimizer]\ndevice = "cpu"\n'},
    ),
    "axolotl's packing": Typical("--data.sample_packing true", "data.sample_packing", "data.pack"),
    "four bits": Typical("--load_in_4bit", "--load_in_4bit", 'precision.frozen_dtype = "nf4"'),
    "a file of YAML": Typical(
        "--config own.yaml", "--config", "it is YAML; write TOML: [section]",
        {"own.yaml": "model:\n  name: x\n"},
    ),
    "recompute = true": Typical(
        "--config own.toml", "memory.recompute", 'write ["layer"], or a list of others of norms',
        {"own.toml": "[memory]\nrecompute = true\n"},
    ),
    "a time for steps": Typical(
        "--checkpoint.interval 30min", "checkpoint.interval", "a whole number (steps between saves)"
    ),
    "a coefficient for a table": Typical(
        "--experts.balance 0.01", "experts.balance", "write experts.balance.sequence = 0.01 (or another key"
    ),
    "data of git-lfs": Typical(
        "--data.kind text --data.path a.txt", "data.path", "run `git lfs pull` in",
        {"a.txt": "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n"},
    ),
    "a folder of configurations": Typical("--config .", "--config", "name a file in it: run.toml"),
}  # fmt: skip
"""Of a trial by somebody who saw the project for the first time. All are found before ranks meet."""

TYPICAL = {**KEYS, **VALUES, **PATHS, **HOSTS, **AT_FIRST_USE}
