"""What a run needs of its hosts, asked before torch is loaded: an address and a port to meet at, and memory
for what no layout can save."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from pathlib import Path

from fsdmoe.checkpoint.host_memory import available_host_bytes
from fsdmoe.config.schema import Config
from fsdmoe.core.rules import size_text
from fsdmoe.models.flops import num_parameters

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def meeting_problems() -> list[str]:
    """Of ranks that were started without torchrun, which has made them meet already."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return []
    rank = os.environ.get("RANK", "0")
    world_size = os.environ.get("WORLD_SIZE", "1")
    if rank.isdecimal() and world_size.isdecimal() and int(rank) >= int(world_size):
        return [f"RANK: expected 0 to {int(world_size) - 1}, since WORLD_SIZE is {world_size}, got {rank}"]
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        fix = "set MASTER_ADDR and MASTER_PORT alike on all ranks, or start them with torchrun"
        line = f"{missing}: expected where the {world_size} ranks of WORLD_SIZE meet, got none; {fix}"
        return [line] if world_size != "1" and not _has_group() else []
    if not port.isdecimal() or int(port) >= 2**16:
        return [f"MASTER_PORT: expected a number below 65536, got {port!r}; set it alike on all ranks"]
    try:
        socket.getaddrinfo(address, int(port))
    except OSError as error:
        fix = "set it to the name or address of the host of rank 0"
        return [f"MASTER_ADDR: expected a host that is known here, got {address!r} ({error.strerror}); {fix}"]
    if os.environ.get("RANK") == "0" and is_taken(int(port)):
        return [
            f"MASTER_PORT: expected a free port, got {port}, which another program listens on; choose "
            "another, alike on all ranks (torchrun --standalone finds one)"
        ]
    return []


def _has_group() -> bool:
    """Whether ranks have met already, in a program that loads configurations later."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def is_taken(port: int) -> bool:
    """Whether a program of this host listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def memory_problems(config: Config, world_size: int) -> list[str]:
    """A model whose weights, gradients and moments alone are more than this host has, where there is no
    GPU to hold them. How much more a run needs is what --dry-run says."""
    if num_gpus():
        return []
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    needed = least_bytes(config) * config.mesh.dp_outer * local // world_size
    available = available_host_bytes()
    if needed <= available:
        return []
    key = "model.hf" if config.model.hf is not None else "model.preset"
    return [
        f"{key}: expected a model that fits this host, got {num_parameters(config.model) / 1e9:,.1f} B "
        f"parameters: weights, gradients and moments of the {local} ranks here take {size_text(needed)} or "
        f"more, and {size_text(available)} of memory are available; take a smaller model, or more hosts as "
        "--dry-run plans them"
    ]


def least_bytes(config: Config) -> int:
    """Of a model's state, all ranks together, as far as nothing makes it smaller."""
    precision = config.precision
    optim = config.optim
    if config.adapter.is_on and config.adapter.freeze_base:
        frozen = {None: _BYTES[precision.param_dtype], "float8": 1}.get(precision.frozen_dtype, 0.5)
        return int(num_parameters(config.model) * frozen)
    moments = 0
    if optim.name == "adamw":
        moments = sum(_BYTES.get(kind, 0 if kind == "torchao_4bit" else 1) for kind in optim.moment_dtypes)
    main = _BYTES[precision.main_dtype] + _BYTES[precision.grad_dtype or precision.main_dtype]
    return num_parameters(config.model) * (main + moments)


def num_gpus() -> int:
    """Those that this process may use, without asking torch, which would have to be loaded."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
