"""Set the cheat sheet, book/cheatsheet.md, on one page of A4 as PDF. `make site` calls it.

It stands in a file because a browser's print of the page would take a browser to build the site.
"""

from __future__ import annotations

import re
from pathlib import Path

from fpdf import FPDF
from matplotlib import font_manager

WIDTH, HEIGHT, MARGIN, GAP, COLUMNS = 297, 210, 8, 5, 3  # mm, A4 lying
COLUMN = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
FONTS = {("text", ""): "DejaVu Sans", ("text", "B"): "DejaVu Sans:bold", ("code", ""): "DejaVu Sans Mono"}
BLUE, PALE = (0, 80, 125), (238, 242, 246)
SMALL, LINE = 7.0, 3.05  # points, mm


def new_page(height: float) -> FPDF:
    """An empty page with the fonts that matplotlib brings."""
    pdf = FPDF(unit="mm", format=(height, WIDTH), orientation="landscape")
    for (name, style), font in FONTS.items():
        pdf.add_font(name, style, font_manager.findfont(font, fallback_to_default=False))
    pdf.set_auto_page_break(False)
    pdf.c_margin = 0.6
    pdf.add_page()
    return pdf


def text(pdf: FPDF, words: str, left: float) -> None:
    """A paragraph that wraps at the column's edge, with `code` in its own font."""
    pdf.set_left_margin(left)
    pdf.set_right_margin(WIDTH - left - COLUMN)
    pdf.set_x(left)
    for number, part in enumerate(re.split("`", words)):
        pdf.set_font("code" if number % 2 else "text", size=SMALL)
        if number % 2 and pdf.get_x() + pdf.get_string_width(part) > left + COLUMN - 2:  # not in the middle of a name
            pdf.ln(LINE)
        pdf.write(LINE, part)
    pdf.ln(LINE + 0.8)


def section(pdf: FPDF, block: str, left: float) -> None:
    """One section of the sheet, from where the page is at."""
    heading, *rest = block.strip().split("\n", 1)
    pdf.set_xy(left, pdf.get_y())
    pdf.set_font("text", "B", SMALL + 0.9)
    pdf.set_text_color(*BLUE)
    pdf.multi_cell(COLUMN, 3.3, heading, new_x="LMARGIN", new_y="NEXT")
    pdf.set_text_color(0)
    pdf.set_y(pdf.get_y() + 0.3)
    for part in re.split(r"(?ms)^(```.*?^```)$", rest[0]):
        if part.startswith("```"):
            code = part.split("\n", 1)[1].removesuffix("```").rstrip()
            pdf.set_font("code", size=SMALL - 0.6)
            pdf.set_fill_color(*PALE)
            for line in code.split("\n"):
                if pdf.get_string_width(line) > COLUMN - 2 * pdf.c_margin:
                    raise ValueError(f"book/cheatsheet.md: too long for its column, break it: {line}")
                pdf.set_x(left)
                pdf.cell(COLUMN, LINE, line, fill=True, new_x="LMARGIN", new_y="NEXT")
            pdf.set_y(pdf.get_y() + 0.9)
        else:
            for paragraph in re.split(r"\n\n|\n(?=- )", part.strip()):
                if paragraph.strip():
                    text(pdf, re.sub(r"\s+", " ", re.sub("^- ", "• ", paragraph.replace("*", ""))), left)
    pdf.set_y(pdf.get_y() + 1.2)


def write(source: Path, target: Path) -> None:
    """The sheet as PDF; raises ValueError if it does not fit on one page."""
    title, *blocks = re.split(r"(?m)^## ", source.read_text(encoding="utf-8"))
    heading, words = title.removeprefix("# ").strip().split("\n\n", 1)
    pdf = new_page(HEIGHT)
    pdf.set_title("Learn TensorFlow on TPUs: cheat sheet")
    pdf.set_lang("en")
    pdf.set_xy(MARGIN, MARGIN - 2)
    pdf.set_font("text", "B", 12)
    pdf.cell(0, 6, f"Learn TensorFlow on TPUs: {heading.lower()}", new_x="LMARGIN", new_y="NEXT")
    pdf.set_font("text", size=SMALL + 0.5)
    pdf.set_x(MARGIN)
    pdf.cell(0, 3.5, re.sub(r"\s+", " ", words.replace("`", "").strip()).replace("lead to", "are those of"))
    top, column = MARGIN + 9, 0
    pdf.set_y(top)
    for block in blocks:
        trial = new_page(2000)
        trial.set_y(top)
        section(trial, block, MARGIN)
        if pdf.get_y() + trial.get_y() - top > HEIGHT - MARGIN / 2:
            column += 1
            pdf.set_y(top)
        if column == COLUMNS:
            raise ValueError("book/cheatsheet.md is too long for one page: shorten it.")
        section(pdf, block, MARGIN + column * (COLUMN + GAP))
    target.parent.mkdir(parents=True, exist_ok=True)
    pdf.output(str(target))
