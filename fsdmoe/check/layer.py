"""A small decoder with one MoE layer under a run's mesh: gradients against one process, who owns which
expert, and a save that is read again."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fsdmoe import checkpoint
from fsdmoe.check.judge import CheckResult, Verdict, judge_gradients, judge_owners
from fsdmoe.checkpoint.agree import from_first, together
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.session import open_verified
from fsdmoe.checkpoint.storage import split_address
from fsdmoe.config import Config
from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.data import Batch
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.feed import Feed
from fsdmoe.fsdp import FSDPConfig, engine_of
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models import Decoder, Initializer, ModelConfig, StepCounts, build_model, materialize
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

_SEED, _STD, _VOCAB = 7, 0.2, 64
_EXPERTS = "experts.down_proj"


class CheckedLayer:
    """The decoder, built for the run's mesh and dispatcher. Collective."""

    def __init__(self, config: Config, meshes: Meshes) -> None:
        degrees = meshes.degrees
        self._meshes = meshes
        self._rows = meshes.size(Axis.BATCH)
        self._length = 8 * 2 * degrees.cp * degrees.tp
        self._config = ModelConfig(
            architecture="qwen3_moe", vocab_size=_VOCAB * degrees.tp, hidden_size=32, num_hidden_layers=1,
            num_attention_heads=4 * degrees.tp * degrees.cp, num_key_value_heads=2 * degrees.tp * degrees.cp,
            head_dim=8, intermediate_size=32 * degrees.tp, moe_intermediate_size=16 * degrees.etp,
            num_experts=2 * degrees.ep, num_experts_per_tok=2, initializer_range=_STD,
        )  # fmt: skip
        dispatcher = config.experts.dispatcher
        # flex drops rows that do not fit its buffers, which a step then repeats: not what is asked here
        self._experts = ExpertsConfig(dispatcher="auto" if dispatcher == "flex" else dispatcher)
        policy = ParallelPolicy(
            experts=self._experts,
            fsdp=FSDPConfig(shard=config.fsdp.shard),
            precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"),
            seed=_SEED,
            initializer_range=_STD,
            grad_divisor=1.0,
        )
        self.model = parallelize(self._build(), meshes, policy)

    def _build(self) -> Decoder:
        return build_model(self._config, self._experts)

    def check_gradients(self) -> CheckResult:
        """Every gradient of one step on all ranks against one process's. Collective."""
        feed = Feed(self._meshes)
        share = self._rows // self._meshes.size(feed.data_axis)
        first = self._meshes.rank(feed.data_axis) * share
        columns = self._batch().columns
        shares: dict[str, Any] = {name: column[first : first + share] for name, column in columns.items()}
        inputs = feed.inputs(feed.prepare([Batch(**shares)]))
        counts = feed.count(self.model, inputs)
        with engine_of(self.model).micro_batch(last=True):
            self.model(**inputs[0], counts=counts, routing=feed.routing()).loss.backward()
        wanted = self._alone()
        differences = {}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            found = parameter.grad.full_tensor()  # type: ignore[attr-defined]
            apart = (found - wanted[name]).abs().max() / wanted[name].abs().max()
            differences[name] = float(apart)
        return judge_gradients(differences)

    def _alone(self) -> dict[str, torch.Tensor]:
        """Gradients of the same model and rows in this process alone."""
        device = self._meshes.device
        model = self._build()
        materialize(model, device, Initializer(_SEED, _STD, self._meshes))
        columns: dict[str, Any] = {name: col.to(device) for name, col in self._batch().columns.items()}
        batch = Batch(**columns)
        vector = model.count_tokens(batch.labels_BS, batch.loss_mask_BS, batch.document_ids_BS)
        counts = StepCounts.from_vector(vector)
        model(
            batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS,
            labels_BS=batch.labels_BS, loss_mask_BS=batch.loss_mask_BS, counts=counts,
        ).loss.backward()  # fmt: skip
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def _batch(self) -> Batch:
        """Rows of all ranks, one document each."""
        generator = torch.Generator().manual_seed(_SEED)
        shape = (self._rows, self._length)
        tokens = torch.randint(0, _VOCAB, shape, generator=generator)
        positions = torch.arange(self._length).expand(shape).contiguous()
        ids = torch.zeros(shape, dtype=torch.int64)
        return Batch(tokens, torch.roll(tokens, -1, 1), positions, ids, torch.ones(shape, dtype=torch.bool))

    def check_owners(self, hosts: list[str]) -> CheckResult:
        """Who owns which expert. Collective."""
        name, experts = next((n, p) for n, p in self.model.named_parameters() if n.endswith(_EXPERTS))
        assert isinstance(experts, ShardedTensor), name
        own: Counter[int] = Counter()
        for box in experts.boxes:
            for expert in range(box.offsets[0], box.offsets[0] + box.sizes[0]):
                own[expert] += box.numel // box.sizes[0]
        told = [self._meshes.rank(Axis.DP_OUTER), sorted(own.items())]
        owned = [dict(pairs) if replica == 0 else {} for replica, pairs in from_all_ranks(told)]
        num_experts = experts.shape[0]
        return judge_owners(owned, experts.numel() // num_experts, num_experts, hosts)

    def check_round_trip(self, folder: str) -> CheckResult:
        """Save to the run's folder, verify every byte, and load. Collective."""
        path = f"{folder}/self_check.tmp"
        try:
            return self._round_trip(path)
        except CheckpointError as error:
            return CheckResult("checkpoint", Verdict.FAILED, str(error))
        finally:
            if "://" not in path and torch.distributed.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)

    def _round_trip(self, path: str) -> CheckResult:
        pieces = [p.piece for p in self.model.parameters() if isinstance(p, ShardedTensor)]
        before = [piece.clone() for piece in pieces]
        checkpoint.save(path, self.model, overwrite=True)
        index = from_first(lambda: len(open_verified(*split_address(path), "full").files))
        with torch.no_grad():
            for piece in pieces:
                piece.zero_()
        checkpoint.load(path, self.model)
        alike = all(torch.equal(*pair) for pair in zip(pieces, before, strict=True))
        wrong = [rank for rank, is_alike in enumerate(from_all_ranks(alike)) if not is_alike]
        if wrong:
            return CheckResult("checkpoint", Verdict.FAILED, f"other values were loaded by ranks {wrong}")
        return CheckResult("checkpoint", Verdict.OK, f"saved, verified and loaded ({index} files in {path})")


def seen_files(folder: Path) -> list[int]:
    """The ranks whose files this one finds in ``folder``, after all have written theirs. Collective."""
    rank = torch.distributed.get_rank()
    own = folder / f".self_check_rank_{rank}"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(str(rank))

    together(write)
    found = sorted(int(path.name.rpartition("_")[2]) for path in folder.glob(".self_check_rank_*"))
    from_all_ranks(None)  # all have looked
    own.unlink(missing_ok=True)
    return found
