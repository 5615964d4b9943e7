"""The repository as a reader sees it: notebooks, their stored outputs, links, style."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from urllib.parse import unquote

import nbformat
import pytest
from conftest import NOTEBOOKS, ROOT

import tpu_compiler
import tpu_helpers
import tpu_measure

CONTENT = {notebook.stem: nbformat.read(notebook, as_version=4) for notebook in NOTEBOOKS}
MODULES = ("tpu_helpers", "tpu_measure", "tpu_keep")
HELPERS = [node for module in MODULES for node in ast.parse((ROOT / f"{module}.py").read_text()).body]
# Not built in a notebook, because they are no lesson: refusing input, silencing TensorFlow's start, listing versions.
PLUMBING = {"Refused", "check_parameters", "quietly", "installed", "describe"}
# Names a TPU runtime where one is asked for, when the notebook is opened on Colab or on Kaggle.
METADATA = {
    "accelerator": "TPU",
    "colab": {"gpuType": "V5E1", "provenance": []},
    "kaggle": {
        "accelerator": "tpuV5e8",
        "dataSources": [],
        "isGpuEnabled": False,
        "isInternetEnabled": True,
        "language": "python",
        "sourceType": "notebook",
    },
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

each_notebook = pytest.mark.parametrize("name", CONTENT)


def code_cells(name):
    return [cell for cell in CONTENT[name].cells if cell.cell_type == "code"]


def tagged(name, tag):
    return [cell for cell in code_cells(name) if tag in cell.metadata.get("tags", [])]


def prose(name):
    return "\n\n".join(cell.source for cell in CONTENT[name].cells if cell.cell_type == "markdown")


def stored(cell):
    """All text that a cell's outputs show."""
    texts = []
    for output in cell.outputs:
        texts.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(texts)


# --- structure


@each_notebook
def test_one_title_three_things_to_learn_a_summary_and_what_comes_next(name):
    first = CONTENT[name].cells[0].source
    assert len(re.findall(r"^# ", prose(name), re.MULTILINE)) == 1
    assert first.startswith("# ")
    assert len(re.findall(r"^- ", first, re.MULTILINE)) == 3
    assert "What you will learn" in first
    assert "## Summary" in CONTENT[name].cells[-1].source
    assert re.search(r"\]\(.+\)", CONTENT[name].cells[-1].source), "no link to what comes next"


@each_notebook
def test_parameters_are_tagged_and_each_line_is_explained(name):
    (cell,) = tagged(name, "parameters")
    assert all(re.fullmatch(r"\w+ = [^#]+  # .+", line) for line in cell.source.splitlines())


def imports_cell(name):
    """The cell after Setup without its imports, which differ, and without what they need to be told (in 11)."""
    statements = ast.parse(code_cells(name)[1].source).body
    lines = [ast.unparse(line) for line in statements if not isinstance(line, ast.Import | ast.ImportFrom)]
    return [line for line in lines if not line.startswith("os.environ['KERAS_BACKEND'] = ")]


@each_notebook
def test_setup_comes_first_and_is_the_same_everywhere(name):
    (setup,) = tagged(name, "setup")
    assert setup == code_cells(name)[0]
    others = [re.sub(r"(?s)FILES = \{.*?\n\}", "", each.source) for each in (setup, tagged("04_fit", "setup")[0])]
    assert others[0] == others[1]
    assert ("tpu_compiler.py" in setup.source) == ("tpu_compiler import" in code_cells(name)[1].source)
    assert ("tpu_keep.py" in setup.source) == any("tpu_keep import" in cell.source for cell in code_cells(name))
    if name != "01_connect_to_tpu":  # which imports TensorFlow later, after the section that installs it
        assert imports_cell(name) == imports_cell("04_fit")


def test_the_install_section_has_the_helpers_own_commands():
    (cell,) = tagged("01_connect_to_tpu", "install")
    commands = [line.strip() for line in cell.source.splitlines() if "%pip" in line]
    assert commands == tpu_helpers.INSTALL.splitlines()
    assert cell.source.startswith("if install:\n")
    assert "install = False  #" in tagged("01_connect_to_tpu", "parameters")[0].source


@each_notebook
def test_cells_are_short(name):
    lengths = [len(cell.source.splitlines()) for cell in code_cells(name)]
    assert statistics.median(lengths) <= 8
    assert max(lengths) <= 40


@each_notebook
def test_plotting_can_be_skipped(name):
    for cell in code_cells(name):
        plots = "plt.subplots" in cell.source or "plt.figure" in cell.source
        assert plots <= ("hide-input" in cell.metadata.get("tags", [])), cell.source[:80]
    for cell in tagged(name, "hide-input"):
        assert cell.source.startswith("# plot: ")


@each_notebook
def test_the_first_cell_says_what_it_needs_and_how_long_it_takes(name):
    """The numbers are written by `make notebooks`."""
    first = CONTENT[name].cells[0].source
    found = re.search(
        r"Needs: .+ Runs in (\d+) s \(recorded: \d+ CPU cores, \w+ \d{4}\), reads in (\d+) minutes", first, re.S
    )
    assert found, first
    assert int(found[1]) >= 5
    assert 3 <= int(found[2]) <= 40


@each_notebook
def test_two_exercises_each_with_a_check_and_a_folded_solution(name):
    """First the stub, then its check, then the solution, and nothing between them."""
    tags = [cell.metadata.get("tags", [""])[0] for cell in CONTENT[name].cells]
    places = [place for place, tag in enumerate(tags) if tag == "exercise"]
    assert len(places) == tags.count("exercise-check") == tags.count("solution") == 2
    for number, place in enumerate(places, 1):
        task, stub, check, solution = CONTENT[name].cells[place - 1 : place + 3]
        assert task.source.startswith(f"### Exercise {number}: ")
        assert tags[place + 1 : place + 3] == ["exercise-check", "solution"]
        assert re.search(r"\.\.\.", stub.source), "nothing is left to fill in"
        assert f"def check_{number}(" in check.source
        assert "Not right: " in check.source
        assert check.source.startswith("# @title Check\n")
        assert check.metadata.jupyter == {"source_hidden": True}
        assert check.source.splitlines()[-1].startswith(f"print(check_{number}(")
        assert solution.source.startswith("# @title Solution\n")
        assert solution.metadata.jupyter == {"source_hidden": True, "outputs_hidden": True}
        assert re.search(rf"assert check_{number}\(.*\.startswith\(\"Right: \"\)", solution.source)
        assert re.search(rf"assert check_{number}\(.*\.startswith\(\"Not right: ", solution.source, re.DOTALL)
        assert re.match(r"Not yet: .{20,}\.\n?$", stored(check)), "the stub is not told what to do"
        assert stored(solution).startswith("Right: ")
        assert "nbval-check-output" in check.metadata.tags, "or nbval would not compare what the stub is told"


def pictures_of(cell):
    return [kind for output in cell.outputs for kind in output.get("data", {}) if kind.startswith("image/")]


@each_notebook
def test_pictures_have_alternative_texts(name):
    for cell in code_cells(name):
        if pictures_of(cell):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert 60 <= len(alt) <= 320, f"{cell.source[:60]}: {alt!r}"
            assert not re.search(r"[\n\"<>]", alt)


@each_notebook
def test_a_colour_is_called_by_what_it_stands_for(name):
    """CHIP, HOST, LINK …, as kit.mplstyle says; no colour of its own for anything but black, white and greys."""
    for cell in tagged(name, "hide-input"):
        colours = re.findall(
            r"""["'](?:C\d[^"']{0,4}|tab:\w+|crimson|red|blue|green|orange|#[0-9a-fA-F]{3,8})["']""", cell.source
        )
        assert not colours, cell.source[:80]


def test_the_style_names_the_colours_that_the_notebooks_use():
    style = (ROOT / "kit.mplstyle").read_text()
    named = re.findall(r"^#   C(\d) (\w+) ", style, re.MULTILINE)
    assert len(re.search(r"cycler\('color', \[(.*)\]", style)[1].split(",")) == len(named)
    source = code_cells("04_fit")[1].source
    assert ", ".join(colour for _, colour in named) + " = " in source


@each_notebook
def test_there_are_pictures_and_proofs(name):
    assert sum(len(pictures_of(cell)) for cell in code_cells(name)) >= 2
    assert sum(cell.source.count("assert") for cell in code_cells(name)) >= 4


# --- stored outputs


@each_notebook
def test_outputs_come_from_one_run_from_top_to_bottom(name):
    assert [cell.execution_count for cell in code_cells(name)] == list(range(1, len(code_cells(name)) + 1))


@each_notebook
def test_outputs_are_clean(name):
    machine = [str(ROOT.parent) + "/", "/tmp/", "/home/", "/root/", "/Users/", "site-packages"]
    for cell in code_cells(name):
        assert not [output for output in cell.outputs if output.output_type == "error"]
        assert not [output for output in cell.outputs if output.get("name") == "stderr"], stored(cell)
        text = stored(cell)
        assert not [path for path in machine if path in text], text
        assert not re.search(r"warning|deprecat|INFO:|^[IWE]\d{4} |\x08|\r", text, re.IGNORECASE | re.MULTILINE), text


@each_notebook
def test_speeds_are_called_measured_predicted_or_recorded(name):
    for cell in code_cells(name):
        text = stored(cell)
        if re.search(r"\d (ms|µs|s)\b|examples/s|/step\b(?!-)", text) and "Epoch 1/" not in text:
            assert re.search(r"measured|predicted|recorded", text), text


@each_notebook
def test_compared_cells_have_something_to_compare(name):
    """nbval passes in silence where nothing is stored."""
    for cell in tagged(name, "nbval-check-output"):
        assert cell.outputs
        assert cell.execution_count


def test_some_outputs_are_compared():
    assert sum(len(tagged(name, "nbval-check-output")) for name in CONTENT) >= 4


@each_notebook
def test_file_is_small_valid_and_of_no_particular_machine(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < 600_000
    nbformat.validate(CONTENT[name])
    assert len({cell.id for cell in CONTENT[name].cells}) == len(CONTENT[name].cells)
    assert CONTENT[name].metadata == METADATA


# --- the lesson stays visible, and helpers are what the notebooks build


def test_scope_compile_and_fit_stand_in_the_notebooks_and_in_no_helper():
    code = ast.unparse(HELPERS)
    for lesson in (".scope()", ".compile(", ".fit("):
        assert lesson not in code
    for name in ("03_build_model_in_scope", "04_fit", "05_tune_batch_size", "06_enable_mixed_bfloat16"):
        source = "\n".join(cell.source for cell in code_cells(name))
        assert "strategy.scope()" in source
        assert "global_batch_size = per_replica_batch_size * replicas" in source


def test_the_model_is_the_same_in_every_notebook():
    cells = {cell.source for name in CONTENT for cell in code_cells(name) if cell.source.startswith("def build_model")}
    assert len(cells) == 1


class Bare(ast.NodeTransformer):
    """Without docstring, type hints, imports and lines that refuse: what helper and notebook have in common."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        node.body = [line for line in node.body if not is_check(line)]
        return node

    def visit_ClassDef(self, node):
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return node

    def visit_For(self, node):
        self.generic_visit(node)
        node.body = [line for line in node.body if not is_check(line)]
        return node if node.body else None

    visit_While = visit_For

    def visit_With(self, node):
        self.generic_visit(node)
        return node if node.body else None

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_Import(self, node):
        return None

    visit_ImportFrom = visit_Import


def is_check(line):
    """A line that only refuses bad input; in a notebook that is an `assert`."""
    call = line.value if isinstance(line, ast.Expr) else None
    if isinstance(line, ast.Assert):
        return True
    name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
    return name.startswith(("_check", "check_parameters"))


def bare(node):
    return ast.unparse(Bare().visit(ast.parse(ast.unparse(node)).body[0]))


PUBLIC = {
    node.name: node
    for node in HELPERS
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
}
BUILT = {
    node.name: (name, node)
    for name in CONTENT
    for cell in tagged(name, "helper")
    for node in ast.parse(cell.source).body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
}


def test_every_helper_is_built_in_a_notebook():
    assert set(PUBLIC) - PLUMBING == set(BUILT)


@pytest.mark.parametrize("helper", BUILT)
def test_helper_is_what_its_notebook_builds(helper):
    _, built = BUILT[helper]
    assert bare(PUBLIC[helper]) == bare(built)


@pytest.mark.parametrize("helper", [helper for helper in BUILT if isinstance(PUBLIC[helper], ast.FunctionDef)])
def test_helpers_docstring_names_its_notebook(helper):
    documentation = ast.get_docstring(PUBLIC[helper])
    assert f"{BUILT[helper][0]}.ipynb" in documentation


def test_the_comparison_would_notice_a_difference():
    helper = PUBLIC["make_dataset"]
    changed = ast.parse(ast.unparse(helper).replace("training and augmented", "training")).body[0]
    assert bare(changed) != bare(helper)
    assert "_check" not in bare(helper)


@pytest.mark.parametrize("helper", PUBLIC)
def test_public_names_are_documented(helper):
    assert ast.get_docstring(PUBLIC[helper])


# --- the table of messages


ROWS = re.findall(r"^\| (.+) \| .+ \| \[(.+)\]\(#(.+)\) \|$", prose("09_when_it_breaks"), re.MULTILINE)
FRAGMENTS = [part for row, _, _ in ROWS if not row.startswith("*") for part in re.findall("`(.+?)`", row)]


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_explain_knows_the_message(fragment):
    assert tpu_measure.explain(f"Error: … {fragment} …") in tpu_measure.MESSAGES.values()


def test_every_message_that_explain_knows_stands_in_the_table():
    meanings = {tpu_measure.explain(fragment) for fragment in FRAGMENTS}
    assert meanings == set(tpu_measure.MESSAGES.values())
    assert len(meanings) >= 18


def test_the_tables_links_lead_to_sections():
    headings = re.findall(r"^## (.+)$", prose("09_when_it_breaks"), re.MULTILINE)
    for _, heading, anchor in ROWS:
        assert heading in headings
        assert anchor == heading.replace(" ", "-")


def test_explain_passes_on_what_it_does_not_know():
    assert tpu_measure.explain(KeyError("x")) == "KeyError: 'x'"
    assert tpu_measure.explain("any text") == "any text"


# --- links, style, and nothing of where this is developed


@pytest.mark.parametrize("name", ["README", *CONTENT])
def test_links_lead_to_files_that_exist(name):
    text, folder = (prose(name), ROOT / "notebooks") if name in CONTENT else ((ROOT / "README.md").read_text(), ROOT)
    for link in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
        if not link.startswith(("http://", "https://", "#")):
            assert (folder / link.partition("#")[0]).exists(), f"{name} links to {link}"


def anchors_of(path):
    """Of a notebook as JupyterLab makes them, of a page of Markdown as GitHub does."""
    if path.suffix == ".ipynb":
        return {
            heading.replace("`", "").replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", prose(path.stem), re.M)
        }
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README", *CONTENT])
def test_links_lead_to_sections_that_exist(name):
    path = ROOT / "README.md" if name == "README" else ROOT / "notebooks" / f"{name}.ipynb"
    text = prose(name) if name in CONTENT else path.read_text()
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        target = (path.parent / file).resolve() if file else path
        assert unquote(anchor) in anchors_of(target), f"{name}: {file}#{anchor}"


def test_the_cheat_sheet_has_the_kits_own_numbers():
    sheet = (ROOT / "book" / "cheatsheet.md").read_text()
    assert tpu_helpers.INSTALL in sheet
    chips = re.findall(r"^(v\w+) +(\d+) GiB +(\d+) TFLOP/s +([\d,]+) GB/s$", sheet, re.MULTILINE)
    assert len(chips) == 5
    for name, *numbers in chips:
        chip = tpu_compiler.GENERATIONS[name]
        assert [int(number.replace(",", "")) for number in numbers] == [chip.hbm_gib, chip.tflops, chip.hbm_gb_per_s]


def test_readme_names_every_notebook_and_every_command():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"notebooks/{name}.ipynb" in readme for name in CONTENT)
    for command in re.findall(r"\bmake ([\w-]+)", readme):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), f"make {command} is not in the Makefile"


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(arguments):
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_nothing_of_where_the_kit_is_developed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for path in tracked:
        if not path.endswith(".png"):
            text = (ROOT / path).read_text()
            for place in (str(ROOT), "pypi" + ".org", "../" + "shared"):
                assert place not in text, f"{path} names {place}"
