"""The site: Sphinx reads the pages that tools/site_pages.py has collected, and the docstrings of d3s_kernels.

It is Sphinx because the docstrings are in its language, reStructuredText. They are read from the sources, so the site
is built without torch and without the compiled library.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tools")]

from project import dynamic_metadata  # noqa: E402  of tools, which is on the path now

project = "d3s_kernels"
release = dynamic_metadata("version", {})
extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon", "sphinx_copybutton", "references"]

# Groups of arguments in a docstring, after those that most callers need.
_GROUPS = ("Ragged batches", "Sampling masks", "Across ranks", "On GPUs", "Memory")
napoleon_custom_sections = [(group, "params_style") for group in _GROUPS]

# Every link, anchor and role has to lead somewhere; `make docs` turns warnings into errors.
nitpicky = True
suppress_warnings = ["autoapi.python_import_resolution"]  # of private names that are not shown
myst_heading_anchors = 4  # made as code hosts make them

autoapi_dirs = [str(ROOT / "d3s_kernels")]
autoapi_generate_api_docs = False
autoapi_options = ["members"]
autodoc_member_order = "bysource"

add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
highlight_language = "none"  # of blocks that name no language: commands, formulas, trees
smartquotes_action = "D"  # dashes alone; quotes stay as they were typed

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
