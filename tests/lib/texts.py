"""Docstrings, comments and messages of sources."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator


def texts_of(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, kind and text of every docstring, other string and comment of three words or more;
    what an f-string formats is {}."""
    nodes = list(ast.walk(ast.parse(source)))
    documents = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    parts = {
        id(part)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in nodes:
        if id(node) in parts or not isinstance(node, (ast.JoinedStr, ast.Constant)):
            continue
        if isinstance(node, ast.JoinedStr):
            values = node.values
        else:
            values = [node]
        pieces = [value.value if isinstance(value, ast.Constant) else "{}" for value in values]
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        if len(text.split()) > 2:
            yield node.lineno, "docstring" if id(node) in documents else "message", text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string
