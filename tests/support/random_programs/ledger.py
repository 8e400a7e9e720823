"""What follows from a program's operations alone, and so is known alike to all ranks: which gradients are
defined, which operations torch's semantics give a meaning, and which the sharded side is free to refuse."""

from __future__ import annotations

from tests.support.random_programs.draw import Op, Program

BACKWARDS = ("backward", "both", "micro", "fail_backward")
WRITES = ("step", "write", "load")


class Ledger:
    """The state of the gradients, by parameter."""

    def __init__(self, program: Program, trained: list[str], subsets: list[list[str]]) -> None:
        self.program, self.names, self.subsets = program, trained, [set(names) for names in subsets]
        self.undefined: set[str] = set()
        """Parameters whose gradient a backward that raised has left in any state."""
        self.may_be_zero: set[str] = set()
        """Parameters whose undefined gradient was zeroed in place: there, or not there at all."""
        self.is_partial = False
        """Micro-batches are announced to follow."""
        self.has_new_state = False
        """One of torch's optimizers that keep state has stepped since the save."""
        self.num_writes = 0
        self.num_hidden_writes = 0
        self.written: dict[int, tuple[int, int]] = {}
        """The number of writes to weights, of all and of hidden ones, when a kept loss was computed."""
        self.kept: dict[int, str] = {}
        """Whose gradient lies on a shelf."""
        self.attached: set[int] = set()
        """Shelves whose gradient is still its parameter's ``.grad``."""

    def is_meant(self, op: Op) -> bool:
        """Whether torch's semantics say what ``op`` does now; where not, it is left out."""
        kind = op[0]
        if kind == "step":
            is_fused = self._is_fused(op[1])
            return not self.undefined & self.subsets[op[1]] and (is_fused or not self.is_partial)
        if kind == "clip":
            return not self.undefined and not self.is_partial
        if kind in ("keep", "scale_grad", "assign_grad"):
            return self._name_of(op) not in self.undefined and not self.is_partial
        return kind != "read" or op[1] not in self.attached or not self.is_partial

    def may_refuse(self, op: Op) -> bool:
        """Whether the sharded side may raise where the plain one does not."""
        kind = op[0]
        if kind in ("grad_params", "grad_x", "read", "assign_grad"):
            return True
        if kind == "load":  # into an optimizer that has made state since: the checkpoint has none for it
            return self.has_new_state
        if kind in BACKWARDS and self.undefined:  # adds to what a backward that raised has left
            return True
        if kind in ("backward", "both"):  # of a loss that weights were written since
            return any(self.written[shelf][0] != self.num_writes for shelf in self._shelves(op))
        return self.is_partial and kind in ("step", "drop")

    def is_unsound(self, op: Op) -> bool:
        """Whether torch goes backward through weights that were written since, and does not see it: through
        ``.data``, or because a layer computes again."""
        recomputes = self.program.shape.recompute != "none" or bool(self.program.shape.parts)
        now = self.num_writes if recomputes else self.num_hidden_writes
        return any(self.written[shelf][0 if recomputes else 1] != now for shelf in self._shelves(op))

    def _shelves(self, op: Op) -> tuple[int, ...]:
        if op[0] not in ("backward", "both", "grad_x", "grad_params"):
            return ()
        return op[1:3] if op[0] == "both" else op[1:2]

    def ends(self, op: Op) -> bool:
        """Whether the sides are apart after the sharded one refused ``op``."""
        return op[0] not in ("grad_params", "grad_x", "read", "backward", "both")

    def note(self, op: Op, *, raised: bool) -> tuple[set[int], set[int]]:
        """Take ``op`` in; returns the shelves of losses and of gradients that are worth nothing now."""
        kind, losses, grads = op[0], set(self._shelves(op) if raised else ()), set[int]()
        if kind == "forward":
            self.written[op[1]] = self.num_writes, self.num_hidden_writes
        elif kind in BACKWARDS:
            self.is_partial = not op[-1]
            if raised or self.is_unsound(op):
                self.undefined |= set(self.names)
                grads, self.attached = self.attached, set()
        elif kind == "keep":
            self.kept[op[1]] = self._name_of(op)
            self.attached.add(op[1])
        elif kind == "assign_grad":
            self._detach({self._name_of(op)})
        elif kind in ("zero", "drop"):
            self._note_dropped(op)
        elif kind == "save":
            self.has_new_state = False
        elif kind in WRITES:
            self.has_new_state |= kind == "step" and self.program.optimizers[op[1]][0] in (
                "adamw",
                "momentum",
            )
            self.num_writes += 1
            self.num_hidden_writes += op[0] == "write" and op[2] == "data"
        return losses, grads

    def _note_dropped(self, op: Op) -> None:
        names, to_none = set(self.names), True
        if op[0] == "drop":
            names = {self._name_of(op)}
        else:
            to_none = op[2] or op[1] == "engine"
            if op[1].startswith("opt"):
                index = int(op[1][3:])
                names, to_none = self.subsets[index], to_none or self._is_fused(index)
        self.may_be_zero -= names
        if not to_none:
            self.may_be_zero |= names & self.undefined
        self.undefined -= names
        if to_none:
            self._detach(names)
        if names == set(self.names):
            self.is_partial = False

    def _detach(self, names: set[str]) -> None:
        self.attached = {shelf for shelf in self.attached if self.kept[shelf] not in names}

    def _is_fused(self, index: int) -> bool:
        return self.program.optimizers[index][0] == "fused"

    def _name_of(self, op: Op) -> str:
        return self.names[op[2 if op[0] == "keep" else 1] % len(self.names)]
