"""The command line of the library: ``d3s COMMAND`` or ``python -m d3s_kernels COMMAND``. Without a command, ``python -m
d3s_kernels`` runs ``d3s doctor``. Imports ``check``, ``planning`` and ``savings``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import d3s_kernels as d3s
from d3s_kernels.check import doctor as _doctor
from d3s_kernels.planning.profile import __main__ as profiling
from d3s_kernels.savings import __main__ as savings_of

DESCRIPTION = """\
The commands of d3s_kernels. python -m d3s_kernels takes them too, and without arguments is d3s doctor.

  d3s doctor     the build and the back-end of each op, and every back-end compared with the reference
  d3s profile    how often a model solves each query of a dataset: the first step of sGPO
  d3s savings    what a selection would save of TRL's update, counted for a model and a batch of yours

d3s COMMAND --help has the options of a command.
"""


def doctor(arguments: Sequence[str]) -> int:
    """Runs ``d3s doctor`` and returns its exit status. The status is 0 if every back-end that runs here agrees with the
    reference, and if every back-end that computes users' calls runs here. Otherwise the status is 1.
    """
    parser = argparse.ArgumentParser(prog="d3s doctor", description="What was built, what runs here, and its checks.")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    as_json = parser.parse_args(arguments).json
    report = _doctor.report(d3s.build_info(), say=lambda text: None if as_json else print(text, flush=True))
    if as_json:
        print(json.dumps(report, indent=2, allow_nan=False))
    return 0 if report["good"] else 1


def profile(arguments: Sequence[str]) -> int:
    return profiling.main(arguments, prog="d3s profile")


def savings(arguments: Sequence[str]) -> int:
    return savings_of.main(arguments, prog="d3s savings")


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"doctor": doctor, "profile": profile, "savings": savings}


def main(arguments: Sequence[str] = ("doctor",)) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="d3s", description=DESCRIPTION, formatter_class=layout)
    parser.add_argument("--version", action="version", version=f"d3s_kernels {d3s.__version__}")
    parser.add_argument("command", choices=COMMANDS)
    command = parser.parse_args(arguments[:1]).command  # each command parses its own arguments
    return COMMANDS[command](arguments[1:])


def console() -> int:
    """The entry point of the console script ``d3s``."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["doctor"]))
