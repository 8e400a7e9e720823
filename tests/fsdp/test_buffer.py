"""Buffers outlive what they must outlive."""

import subprocess
import sys

from fsdmoe.fsdp import buffer

PROGRAM = """
import gc, importlib.util, sys, types
for name in ("torch", "torch.distributed"):  # which takes long to import, as the package does
    sys.modules[name] = types.ModuleType(name)
spec = importlib.util.spec_from_file_location("buffer", sys.argv[1])
buffer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(buffer)

class Loud:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print(self.name, flush=True)

kept, dropped = Loud("kept"), Loud("dropped")
kept.itself, dropped.itself = kept, dropped
buffer.keep_forever(kept)
del kept, dropped
gc.collect()
"""


def test_what_is_kept_is_not_destroyed_at_the_end_of_the_program() -> None:
    """A pool that was registered with communicators would abort the process then."""
    command = [sys.executable, "-c", PROGRAM, buffer.__file__]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["dropped"]
