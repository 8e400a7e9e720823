"""Two torchrun agents train as two machines would, and one agent goes on, by the commands of the page."""

import socket
from pathlib import Path

import pytest
import torch.distributed.run

from fsdmoe.observe.metrics import read_metrics
from tests.support.scripts import Program
from tests.support.snippets import ROOT, Command, blocks, commands

TRAINING = [
    command
    for block in blocks(ROOT / "docs/many_machines.md")
    if not block.needs
    for command in commands(block)
    if command.words[0] == "torchrun"
]


def agent(command: Command, folder: Path, port: int) -> Program:
    """The page's command, with a free port, a folder of the test's and a smaller model."""
    words = list(command.words[1:])
    words[words.index("--train.output_dir") + 1] = str(folder)
    if "--rdzv-endpoint" in words:
        words[words.index("--rdzv-endpoint") + 1] = f"localhost:{port}"
    quiet = ["--observe.tensorboard", "false", "--observe.log_interval", "1", "--train.eval_interval", "-1"]
    small = ["--model.hidden_size", "64", "--model.num_hidden_layers", "1", "--data.seq_len", "64"]
    return Program(torch.distributed.run.__file__, *words, *quiet, *small)


def finish(*agents: Program) -> str:
    """What the agents printed, once all have ended well."""
    try:
        for one in agents:
            assert one.wait(200) == 0, one.stdout + one.stderr
        return "".join(one.stdout + one.stderr for one in agents)
    finally:
        for one in agents:
            one.kill()


@pytest.mark.full
def test_two_agents_train_and_one_goes_on(tmp_path: Path) -> None:
    *both, alone = TRAINING[:3]  # the first ones: a later section has one of its own
    assert [command.world_size for command in TRAINING[:3]] == [2, 2, 1]
    assert both[0].words == both[1].words, "the same command on every node"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    finish(*(agent(command, tmp_path, port) for command in both))
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    printed = finish(agent(alone, tmp_path, port))
    assert "step_00000004" in printed, "resumed"
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
