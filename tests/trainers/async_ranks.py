"""One of several processes that train together; it leaves in a folder what it has then.

torchrun ... async_ranks.py FOLDER POLICY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from test_trl_async import outcome

if __name__ == "__main__":
    folder, policy = sys.argv[1:]
    torch.save(outcome(policy, int(os.environ["WORLD_SIZE"])), Path(folder) / f"{os.environ['RANK']}.pt")
