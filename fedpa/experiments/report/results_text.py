"""The results table as Markdown and as LaTeX, to be pasted into a README or a paper."""

from collections.abc import Sequence

from fedpa.experiments.report.results import Results

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    "ρ": r"$\rho$",
}


def markdown(results: Results) -> str:
    """A table as GitHub shows it; numbers to the right, what they are below."""
    rules = ["---", *("---:" for _ in results.header[1:])]
    lines = [_line(results.header), _line(rules), *(_line(row) for row in results.rows)]
    return "\n".join([*lines, "", _markdown_text(results.caption)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_markdown_text(cell) for cell in cells) + " |"


def _markdown_text(text: str) -> str:
    """Bars end a cell, lines end a row, and < begins HTML."""
    plain = " ".join(text.split()).replace("\\", "\\\\")
    return plain.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def latex(results: Results) -> str:
    """A tabular with booktabs' rules; what the numbers are is a comment, to make a caption of."""
    columns = "l" + "r" * (len(results.header) - 1)
    rows = [_latex_row(row) for row in results.rows]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            f"% {latex_text(results.caption)}",
            f"\\begin{{tabular}}{{{columns}}}",
            "\\toprule",
            _latex_row(results.header),
            "\\midrule",
            *rows,
            "\\bottomrule",
            "\\end{tabular}",
            "",
        ]
    )


def _latex_row(cells: Sequence[str]) -> str:
    # A row that begins with [ would be read as an argument of the \\ before it.
    texts = [latex_text(cell) for cell in cells]
    first = f"{{}}{texts[0]}" if texts[0].startswith("[") else texts[0]
    return " & ".join([first, *texts[1:]]) + r" \\"


def latex_text(text: str) -> str:
    """Characters that LaTeX would take for commands, as text."""
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
