"""Settings of the process that must be made before torch and the Hugging Face libraries are imported."""

from __future__ import annotations

import logging
import os
import warnings


def prepare(threads: int) -> None:
    """Sets the environment variables. Offline: the example makes its own model, and a user's model is on the disk."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        TRANSFORMERS_VERBOSITY="error",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS=str(threads),
        OMP_WAIT_POLICY="passive",  # waiting threads sleep; spinning would slow down other processes
    )


def silence() -> None:
    """Lets the libraries print only errors: with many runs, other messages would hide the progress bars."""
    import datasets
    import transformers

    warnings.filterwarnings("ignore")
    logging.getLogger("trl").setLevel(logging.ERROR)
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
