"""What all runs of an experiment share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .pricings import MEASURED
from .problems import Problem, of_chains, of_user

FILE = "setting.json"
FREE = ("folder", "jobs")  # may differ from command to command


@dataclass(frozen=True)
class Setting:
    folder: Path  # of the start models, the finished runs and the report
    model: Path | None = None  # a user's model to start from; None: one that has begun to learn chains
    dataset: Path | None = None
    enough: float = 0.3  # Pass@1 at which the supervised training of the start model ends
    slips: float = 1.0  # in the work that it learns from, as a multiple of those in chains.py
    strict: bool = False  # a chain's completion is right only if all of its steps are
    pricing: str = MEASURED  # the prices that determine how long a run lasts, by their name in pricings.py
    rates: tuple[float, ...] = (1e-4, 2e-4, 4e-4)  # the first learning rates that are tried, of every arm
    prompts: int = 8  # of a batch
    many: int = 32  # rollouts of a prompt
    few: int = 8  # of them, those that are trained on; or that GRPO generates where it generates few
    steps: int = 40  # of GRPO with many rollouts: they determine the priced time that each arm gets
    evaluations: int = 8  # after the first one, which is that of the start model
    held_out: int = 128  # prompts of an evaluation
    longest: int = 256  # tokens of a completion of a user's model
    micro_batch: int | None = None  # rollouts of which all activations are held at once
    threads: int = 1  # of each run
    jobs: int = 2  # runs at a time

    def problem(self) -> Problem:
        if self.model is None or self.dataset is None:
            return of_chains(self.strict)
        return of_user(self.model, self.dataset, self.held_out, self.longest)

    def start(self, seed: int) -> Path:
        """The folder of the model that all arms of a seed start from."""
        return self.model or self.folder / "start" / str(seed)

    def keep(self) -> None:
        """Writes the setting into its folder.

        Raises:
            ValueError: the folder has runs of another setting; the message names what differs.
        """
        path = self.folder / FILE
        if path.exists():
            before, now = asdict(load(self.folder)), asdict(self)
            changed = [name for name, value in now.items() if name not in FREE and value != before[name]]
            if changed:
                name = changed[0]
                raise ValueError(
                    f"--{name.replace('_', '-')}: got {now[name]}; {self.folder} has runs with {before[name]}, "
                    "and takes this, or give another --folder"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        path.write_text(json.dumps({n: v for n, v in kept.items() if n not in FREE}, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> Setting:
    """The setting of the runs in this folder."""
    found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    paths = {name: Path(found[name]) for name in ("model", "dataset") if found[name]}
    return Setting(folder, **found | paths | {"rates": tuple(found["rates"])})
