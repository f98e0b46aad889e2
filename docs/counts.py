"""Counts files, lines of code, comments, and the clauses of prose that read like a private dialect.

    python docs/counts.py                      print the counts of this checkout
    python docs/counts.py --base 0a2a504       and beside them those of a revision
    python docs/counts.py fpsim/kernels ...    of these folders only

A line of code is neither blank nor comment nor docstring. Prose is docstrings and comments.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("fpsim", "ada_loss")
# Clauses in place of a noun ("what is known of one tensor" for "state of one tensor"). Questions count too: there are
# few, and no pattern tells them from clauses.
CLAUSE = re.compile(
    r"\bwhat(?:ever)?\s+(?:is|are|was|were|has|have|it|they|an?|the|one|each|this|that|to)\b", re.IGNORECASE
)
OPENING = re.compile(
    r"(?:What|Whatever|Whether|Who|Whoever|Whose|Which|Where|Wherever|When|How|Those (?:that|who|of))\b(?![^.]*\?)"
)
INVERTED = re.compile(
    r"\b(?:is|are) (?:none|no)\b(?! longer)|\bof several the one\b|\bin the place of\b", re.IGNORECASE
)
PRAGMA = re.compile(r"#\s*(?:noqa|type:|fmt:|ruff:|mypy:|pragma)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module, and of all that it defines."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr):
            text = node.body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text


def count(source: str) -> dict[str, int]:
    """Count the lines of code and of comments of one file, and the clauses of its prose."""
    quoted = [*docstrings(ast.parse(source))]
    inside = {line for text in quoted for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    code: set[int] = set()
    comments: dict[int, str] = {}
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string
        elif token.type not in skipped:
            code |= {*range(token.start[0], token.end[0] + 1)}
    own = [line for line in comments if line not in code and not PRAGMA.match(comments[line])]
    prose = "\n".join([*(text.value for text in quoted), *(text.lstrip("#! ") for text in comments.values())])
    return {
        "lines": len(source.splitlines()),
        "code": len(code - inside),
        "comments": len(own),
        "clauses": len(CLAUSE.findall(prose)),
        "openings": sum(bool(OPENING.match(text.value.strip())) for text in quoted),
        "inverted": len(INVERTED.findall(prose)),
    }


def sources(base: str | None) -> dict[str, str]:
    """Read the files that git knows, of this checkout or of a revision; files of data are empty."""
    if base is None:
        names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [name for name in names.stdout.splitlines() if (ROOT / name).is_file()]
        return {name: (ROOT / name).read_text() if name.endswith(".py") else "" for name in paths}
    packed = subprocess.run(["git", "archive", "--format=tar", base], cwd=ROOT, capture_output=True, check=True)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        for member in files:
            if (opened := files.extractfile(member)) is not None:
                found[member.name] = opened.read().decode() if member.name.endswith(".py") else ""
    return found


def table(base: str | None, folders: list[str]) -> dict[str, str]:
    """Return the rows of one column: what is counted, and the count."""
    files = sources(base)

    def total(*places: str) -> dict[str, int]:
        """Sum the counts of the Python files in some folders, or of single files."""
        of = [count(text) for name, text in files.items() if name.endswith(".py") and f"{name}/".startswith(places)]
        return {key: sum(row[key] for row in of) for key in count("")}

    product = total(*(f"{folder.rstrip('/')}/" for folder in folders))

    def share(of: str) -> str:
        """Return the comments on their own line as a percentage."""
        return f"{100 * product['comments'] / max(product[of], 1):.1f}"

    return {
        "files in git": f"{len(files):,}",
        "lines of code": f"{product['code']:,}",
        "lines of code, tests": f"{total('tests/')['code']:,}",
        'clauses "what is ...", "what has ..."': f"{product['clauses']:,}",
        'docstrings that begin with "What", "Whether", "Where" ...': f"{product['openings']:,}",
        '"is none", "is no", "in the place of"': f"{product['inverted']:,}",
        "comments on their own line": f"{product['comments']:,}",
        "comments on their own line, % of all lines": share("lines"),
        "comments on their own line, % of lines of code": share("code"),
    }


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--base", metavar="REV", help="a revision to compare with")
    arguments.add_argument("folders", nargs="*", default=PRODUCT, help="folders or files of the product")
    options = arguments.parse_args()
    columns = [None] if options.base is None else [options.base, None]
    tables = [table(base, [*options.folders]) for base in columns]
    print(f"{'':60}" + "".join(f"{(base or 'now')[:10]:>12}" for base in columns))
    for row in tables[-1]:
        print(f"{row:60}" + "".join(f"{found[row]:>12}" for found in tables))


if __name__ == "__main__":
    main()
