"""torch.distributed.checkpoint's protocol, for a tensor that says itself which boxes of it a rank holds."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdmoe.boxes import Box
from fsdmoe.fsdp.access import Access


class BoxedTensor:
    """What stock ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` ask of a tensor."""

    _piece: torch.Tensor
    access: Access
    shape: torch.Size

    @property
    def piece(self) -> torch.Tensor:
        raise NotImplementedError

    @property
    def boxes(self) -> tuple[Box, ...]:
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._piece)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Asked for by a load, which writes the boxes later; of every rank, so that all count alike, also
        # those that hold no box.
        self.access.writes += 1
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if not self.shape.numel():
            return self._piece.view(self.shape)
        for box in self.boxes:
            if index.offset is not None and box.offsets == tuple(index.offset):
                return box.view_of(self.piece)
        raise ValueError(f"this rank holds no box at {index.offset} of {index.fqn}")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        if not self.shape.numel():  # no rank holds a box, but the name must reach the checkpoint
            return [ChunkStorageMetadata(torch.Size([0] * len(self.shape)), self.shape)]
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]
