"""One step of a ring: something to the next rank of a group, something else from the previous one."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class RingSendRecv:
    """A transfer under way. Holds both tensors, so that their memory is not reused before ``wait``; on a GPU
    that blocks the current stream, not the host. Backends that match messages by ``tag`` never confuse two
    kinds."""

    def __init__(
        self, sent: Tensor, received: Tensor, group: dist.ProcessGroup | None, *, tag: int = 0
    ) -> None:
        self.sent, self.received = sent, received
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        send = dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size, tag=tag)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size, tag=tag)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received
