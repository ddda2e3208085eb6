"""Runs a script in several processes, as users start theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_processes(script: Path, ranks: int, folder: Path, *arguments: str) -> str:
    """Calls the script with the folder and the arguments. Returns what it prints."""
    # By number, because not every container knows a name of its own or `localhost`, which --standalone relies on.
    here = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *here, f"--nproc_per_node={ranks}"]
    path = os.pathsep.join([str(script.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(script), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
