"""What a run needs of the disk: its data, a tokenizer that fits the model, folders that it can write to and,
looked at ahead of time by ``--dry-run``, weights and checkpoints to start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fsdmoe.checkpoint.addresses import why_not_opened
from fsdmoe.checkpoint.config import RUN_FOLDER
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.config.checks import Findings, asked
from fsdmoe.config.kept import start_problems
from fsdmoe.config.schema import Config
from fsdmoe.config.weights import weight_problems
from fsdmoe.core.rules import choice_like
from fsdmoe.data.files import why_not_writable
from fsdmoe.data.sources import data_problems
from fsdmoe.data.tokenizer import Tokenizer


def disk_findings(
    config: Config, *, is_plan: bool, is_refused: bool = False, writes: bool = True
) -> Findings:
    """Whether the data is there and its tokens are known to the model, and the folders of the run and of its
    checkpoints can be written. A run makes these folders, unless it ``is_refused`` already; one that only
    evaluates ``writes`` nothing, and is not asked for them. A plan
    (``is_plan``) makes nothing, and also finds what a run would only see once it builds its model."""
    only_looks = is_plan or is_refused
    problems, tokenizer = data_problems(config.data, is_plan=only_looks)
    found: Findings = [((line.partition(":")[0], "model.hf"), line) for line in problems]
    if tokenizer is not None:
        found += _vocabulary_findings(config, tokenizer)
    for key, name in _folders(config) if writes else ():
        folder = Path(name).expanduser()
        if why := why_not_writable(folder, make=not only_looks):
            line = f"{key}: expected a folder to write to, got {name!r} ({why}); name another"
            found.append(((key,), line))
    found += _address_findings(config) + _pickled_findings(config) + _weight_findings(config)
    if "://" not in config.checkpoint.folder and _has_begun(config):  # else the run itself looks
        found += [(("checkpoint.load",), line) for line in start_problems(config)]
    return found + (_start_findings(config) if is_plan else _load_findings(config))


def _folders(config: Config) -> Iterator[tuple[str, str]]:
    yield "train.output_dir", config.train.output_dir
    checkpoint = config.checkpoint
    if checkpoint.interval >= 0 and checkpoint.folder and "://" not in checkpoint.folder:
        yield "checkpoint.folder", checkpoint.folder


def _address_findings(config: Config) -> Findings:
    """Object stores that fsspec does not know, or knows and has not the package for."""
    checkpoint = config.checkpoint
    addresses = {"checkpoint.folder": checkpoint.folder, "checkpoint.load": checkpoint.load}
    found: Findings = []
    for key, address in addresses.items():
        is_store = "://" in address and not address.startswith("file://")
        if is_store and (why := why_not_opened(address)):
            line = f"{key}: expected an address that can be opened here, got {address!r}: {why}"
            found.append(((key,), line))
    return found


def _vocabulary_findings(config: Config, tokenizer: Tokenizer) -> Findings:
    model = config.model
    num_tokens = config.data.vocab_size or tokenizer.vocab_size
    if num_tokens <= model.vocab_size:
        return []
    fix = f"raise it to at least {num_tokens}"
    if model.hf is not None:
        fix = f"set data.tokenizer = {model.hf!r}, or another that the model was made for"
    keys = ("model.vocab_size", "model.preset", "model.hf", "data.tokenizer", "data.vocab_size")
    line = f"model.vocab_size: the tokenizer has {num_tokens} tokens, the model {model.vocab_size}; {fix}"
    return [(keys, line)]


def _has_begun(config: Config) -> bool:
    """Whether the run may have checkpoints of its own."""
    own = config.checkpoint.folder or str(Path(config.train.output_dir) / RUN_FOLDER)
    return "://" in own or any(Path(own).expanduser().glob("step_*"))


def _pickled_findings(config: Config) -> Findings:
    """Weights of the model's folder that are there, but as pickles, which are never loaded."""
    hf = config.model.hf
    if hf is None or config.model.random_weights or _has_begun(config):
        return []
    if config.checkpoint.load not in ("latest", "none"):  # the weights are to come from there
        return []
    folder = Path(hf).expanduser()
    pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if not pickled or any(folder.glob("*.safetensors")):
        return []
    line = (
        f"model.hf: expected weights as *.safetensors, got {pickled[0]} in {hf!r}, a pickle, which may run "
        "code when loaded; convert it once to safetensors with transformers: "
        f"AutoModelForCausalLM.from_pretrained({hf!r}).save_pretrained(NEW_FOLDER)"
    )
    return [(("model.hf",), line)]


def _weight_findings(config: Config) -> Findings:
    """Weights of the model's folder that are not whole, where the run is to start from them."""
    hf = config.model.hf
    if hf is None or config.model.random_weights or _has_begun(config):
        return []
    if config.checkpoint.load not in ("latest", "none"):
        return []
    return [(("model.hf",), line) for line in weight_problems(Path(hf).expanduser())]


def _load_findings(config: Config) -> Findings:
    """A start that is not there at all. A run that has begun goes on without it."""
    load = config.checkpoint.load
    if load in ("latest", "none") or "://" in load or Path(load).expanduser().exists():
        return []
    if _has_begun(config):
        return []
    fix = choice_like(load, ("latest",)) or "name another one, or set it to none to start anew"
    line = (
        f'checkpoint.load: expected "latest", "none" or a folder, got {load!r}, which does not exist; {fix}'
    )
    return [(("checkpoint.load",), line)]


def _require_whole(load: str, *, weights_only: bool) -> None:
    """Refuse a start that is none, or whose files are missing or cut off; checksums are not looked at."""
    from fsdmoe.checkpoint.catalog import require_start  # not above: they load torch
    from fsdmoe.checkpoint.session import open_verified
    from fsdmoe.checkpoint.storage import open_storage

    root, names, is_one = require_start(load, weights_only=weights_only)
    if is_one:  # of several, a run takes the newest that is whole
        open_verified(open_storage(root), names[0], "fast")


def _start_findings(config: Config) -> Findings:
    """Weights and checkpoints that the run is to start from, and routing that it is to replay. What is behind
    an address (s3://) is not asked for."""
    # Not above: they load torch, which a plan does anyway.
    from fsdmoe.checkpoint.catalog import entries
    from fsdmoe.checkpoint.storage import open_storage
    from fsdmoe.experts.replay import RoutingTape
    from fsdmoe.huggingface.folder import require_weights

    found: Findings = []
    checkpoint = config.checkpoint
    load = config.checkpoint.load
    folder = checkpoint.folder or str(Path(config.train.output_dir) / RUN_FOLDER)
    resumes = load != "none" and ("://" in folder or bool(entries(open_storage(folder))))
    if load not in ("latest", "none") and not resumes and "://" not in load:
        only_model = checkpoint.load_only_model
        try:
            keys = ("checkpoint.load", "checkpoint.load_only_model")
            found += asked(_require_whole, load, weights_only=only_model, keys=keys)
        except CheckpointError as error:
            fix = "name another one, or set it to none to start anew"
            found.append((("checkpoint.load",), f"checkpoint.load: {error}; {fix}"))
        resumes = not found
    keys = ("model.hf", "checkpoint.load")
    if not _pickled_findings(config):
        found += asked(require_weights, config.model, config.precision, resumes=resumes, keys=keys)
    refused = asked(RoutingTape.from_config, config.experts, keys=("experts.replay",))
    return found + [(keys, f"experts.{line}") for keys, line in refused]
