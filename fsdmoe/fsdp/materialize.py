"""Values into shards: from parameters that have them, or, one parameter at a time, from an initialiser.

A model built on the meta device has no memory; each of its parameters is filled in a temporary of its local
shape, this rank keeps its piece, and the temporary is freed. So a model that is larger than one rank can be
built. One that has values was filled by each rank for itself, not always alike (adapters without a seed): all
take those of the first rank, as under DDP."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core.all_ranks import from_all_ranks, require_alike
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import local_tensor
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.param_group import ParamGroup

logger = logging.getLogger(__name__)

InitFn = Callable[[str, nn.Parameter, torch.Tensor], None]
"""``init_fn(name, parameter, out)`` writes the initial value of ``parameter`` into ``out``, a float32 tensor
of its local shape. It must depend on the name alone (not on the order of calls): ranks skip what they hold
nothing of."""
BUILT_ALIKE = "build the model alike on all of them, from the same files and arguments"
_CHUNK = 1 << 18
"""Words that are multiplied at a time: as many as a cache holds."""
_MULTIPLIER = 0x9E3779B1
_MOST_NAMES = 5


@torch.no_grad()
def agree_on_values(model: nn.Module, device: torch.device) -> None:
    """Give all ranks the first rank's values of parameters and buffers that are not alike, and warn. What is
    split already (a DTensor) or is of a tensor class of its own stays as it is. Collective."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    plain = {name: each.detach() for name, each in named if type(each.detach()) is torch.Tensor}
    where = {name: "on the meta device" if each.is_meta else "with values" for name, each in plain.items()}
    valued = {name: each for name, each in plain.items() if not each.is_meta and _has_bytes(each)}
    sums = _checksums(list(valued.values()), device)
    forms = [(name, where[name], tuple(each.shape), str(each.dtype)) for name, each in plain.items()]
    digests = from_all_ranks([_digest(forms), _digest(sums.tolist())])
    if all(each == digests[0] for each in digests):
        return
    if any(form != digests[0][0] for form, _ in digests):
        require_alike({f"parallelize: {name}": place for name, place in where.items()}, BUILT_ALIKE)
        return  # of other shapes or dtypes: the plan names them
    first = sums.clone()
    dist.broadcast(first, 0)
    differs = (sums != first).to(torch.int32)
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    names = list(itertools.compress(valued, differs.tolist()))
    for name in names:
        _broadcast(valued[name], device)
    if dist.get_rank() == 0:
        logger.warning(
            "parallelize: %d of %d parameters and buffers had other values on other ranks (%s%s); all ranks "
            "have those of rank 0 now. Seed all ranks alike (torch.manual_seed) before the model and its "
            "adapters are built",
            len(names), len(valued), ", ".join(names[:_MOST_NAMES]), ", …" if names[_MOST_NAMES:] else "",
        )  # fmt: skip


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0


def _digest(facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)  # a row of every second element has a step


def _checksums(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One integer for the bits of each tensor and their order, on ``device``: sums of integers do not depend
    on how a device adds them up."""
    weights: dict[torch.device, torch.Tensor] = {}
    sums = []
    for tensor in tensors:
        if tensor.device not in weights:
            weights[tensor.device] = torch.arange(1, 2 * _CHUNK, 2, device=tensor.device)
        sums.append(_checksum(_bytes_of(tensor), weights[tensor.device]).to(device))
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def _checksum(data: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in (data[:whole].view(torch.int64), data[whole:]):
        for chunk in part.split(_CHUNK):
            total = total * _MULTIPLIER + (chunk * weights[: chunk.numel()]).sum()
    return total


def _broadcast(tensor: torch.Tensor, device: torch.device) -> None:
    data = _bytes_of(tensor).to(device)
    dist.broadcast(data, 0)
    tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def fill_group(
    group: ParamGroup, values: dict[str, nn.Parameter], device: torch.device, init_fn: InitFn | None
) -> None:
    """Fill the main weights of ``group`` from ``values``, parameter by parameter, dropping each when done."""
    for param in group.params:
        parameter = values.pop(param.name)
        if group.owned_range(param).numel == 0:
            continue
        group.fill(param, _value(param, parameter, device, init_fn))
    if device.type == "cuda":
        # Else the next buffers are cut out of what the temporaries took, and leave holes between them: of no
        # use to CUDA graphs, whose memory is apart.
        torch.cuda.empty_cache()


def _value(
    param: FlatParam, parameter: nn.Parameter, device: torch.device, init_fn: InitFn | None
) -> torch.Tensor:
    if not parameter.is_meta:
        return local_tensor(parameter)
    if init_fn is None:
        raise ConfigError(
            f"fsdp: {param.name} is on the meta device and has no value; pass init_fn=(name, parameter, "
            "out) to fully_shard, or load the model before"
        )
    out = torch.empty(local_tensor(parameter).shape, dtype=torch.float32, device=device)
    init_fn(param.name, parameter, out)
    return out


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Module buffers are not sharded: they go to the compute device as they are."""
    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if on_meta:
        raise ConfigError(
            f"fsdp: buffers on the meta device have no value: {', '.join(on_meta[:5])}; compute them before "
            "fully_shard"
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
