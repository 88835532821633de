"""Sphinx settings."""

from pathlib import Path

_version = {}
exec((Path(__file__).parents[1] / "llm_datadist" / "_version.py").read_text(), _version)

project = "llm-datadist"
copyright = "the llm-datadist contributors, Apache-2.0"
release = version = _version["__version__"]

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
autodoc_typehints = "none"  # docstrings say the types, and the ranges
numpydoc_show_class_members = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = f"llm-datadist {release}"
