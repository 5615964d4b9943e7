"""Sphinx's settings for the site that `make site` builds; its pages are put together by tools/make_site.py."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # autodoc imports the modules, and they TensorFlow

project = "Learn TensorFlow on TPUs"
author = "The authors of the kit"
project_copyright = "the authors of the kit, Apache License 2.0"
language = "en"
highlight_language = "text"  # where a block does not say its own

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
nitpicky = True
default_role = "code"  # what stands in `backticks` in a docstring
autodoc_typehints = "none"  # they stand in the signature's names; docstrings have shapes and units
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # nor Keras' own of what a callback overrides
autodoc_member_order = "bysource"

myst_enable_extensions = ["colon_fence", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the outputs are those of `make notebooks`
nb_merge_streams = True
nb_code_prompt_show = "Show the {type}"
nb_code_prompt_hide = "Hide the {type}"

myst_heading_slug_func = "make_site.anchor"

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # dark or light, as the reader's system has it
html_css_files = ["kit.css"]
html_js_files = [("kit.js", {"defer": "defer"})]
html_show_sourcelink = False
html_copy_source = False
html_last_updated_fmt = None
html_extra_path = [str(ROOT / "build" / "book-files")]
templates_path = ["_templates"]
html_sidebars = {"**": ["contents.html"]}
html_theme_options = {
    "navbar_center": [],
    "navbar_persistent": ["search-button-field"],  # on a phone, too
    "navbar_end": ["theme-switcher"],
    "navigation_with_keys": False,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": [], "cheatsheet": []},
    "article_header_start": [],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_exclude = ".linenos, .gp, .go"
