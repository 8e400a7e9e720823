"""``in_folder.py FOLDER script arguments``: the script as if it had been started in that folder."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder, *sys.argv = sys.argv[1:]
    os.chdir(folder)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
