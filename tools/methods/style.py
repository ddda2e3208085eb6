"""The common style of the pictures, and the text in each file that describes what is drawn."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

INK, PALE = "#222222", "#bbbbbb"
PHASES = ("#1b7837", "#e08214", "#762a83")
WIDTH = 10.0


def new_figure(height: float) -> Figure:
    mpl.rcdefaults()  # independent of the user's settings
    mpl.rcParams.update(
        {
            "font.size": 9,
            "axes.titlesize": 9,
            "axes.labelsize": 9,
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "legend.fontsize": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.color": INK,
            "axes.labelcolor": INK,
        }
    )
    return Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")


def save(figure: Figure, path: Path, drawn: str) -> None:
    """Saves the picture with the text ``drawn`` in the file. Tests compare the text, since pixels differ between
    versions of matplotlib.
    """
    drawing = BytesIO()
    figure.savefig(drawing, dpi=120)
    words = PngInfo()
    words.add_text("Description", drawn)
    picture = Image.open(drawing).convert("RGB")
    few_colours = picture.quantize(200, dither=Image.Dither.NONE)  # a third of the file size
    few_colours.save(path, optimize=True, pnginfo=words)
