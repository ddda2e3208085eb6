"""One training step of a small language model, with TRL's GRPOTrainer and with D3STrainer, on the same answers.

    make demo                                    # SmolLM2-135M-Instruct, some 75 s on two cores
    python examples/demo.py --model FOLDER       # another model with its tokenizer and chat template
    python examples/demo.py                      # a tiny model that is made on the spot

The model answers word problems. D3STrainer then makes its update at the start, in the middle and at the end of its
schedule. A table shows what each update keeps and costs; a page shows the text of the answers, token by token.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# Read when torch and the Hugging Face libraries are imported. Waiting threads sleep, as spinning slows other processes;
# large tensors come in pages of 2 MiB, because getting fresh memory in pages of 4 KiB takes longer than using it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TRANSFORMERS_VERBOSITY="error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a model, its tokenizer and its chat template")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the page (default: demo)")
    parser.add_argument("--seed", type=int, default=1, help="of the problems and of the sampling (default: 1)")
    given = parser.parse_args()
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"--model: {given.model} has no config.json; takes the folder of a saved model")
    from _demo.run import run  # after the arguments are checked: torch and transformers take seconds to import

    run(given.model, given.out, given.seed)


if __name__ == "__main__":
    main()
