"""Sphinx settings. Executes nothing and needs no network."""

project = "qsim"
author = "qsim founders"
copyright = "2026, qsim founders"  # the name is Sphinx's

extensions = ["myst_nb"]
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]

exclude_patterns = ["_build", "images"]
html_theme = "alabaster"
html_theme_options = {
    "description": "Low-precision numerics and the life of stateful quantizers",
    "page_width": "1100px",
}
html_show_sphinx = False
