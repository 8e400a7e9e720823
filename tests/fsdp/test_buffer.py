"""Buffers outlive what they must outlive."""

import subprocess
import sys

PROGRAM = """
import gc
from fsdmoe.fsdp.buffer import keep_forever

class Loud:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print(self.name, flush=True)

kept, dropped = Loud("kept"), Loud("dropped")
kept.itself, dropped.itself = kept, dropped
keep_forever(kept)
del kept, dropped
gc.collect()
"""


def test_what_is_kept_is_not_destroyed_at_the_end_of_the_program() -> None:
    """A pool that was registered with communicators would abort the process then."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["dropped"]
