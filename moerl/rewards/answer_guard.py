"""Which answers may reach a reasoning_gym scorer.

Nine of its scorers evaluate the answer as code (`eval`, or sympy's `parse_expr`, which ends in `eval`), and one builds
an exact fraction of any size. Here the answer was written by a model under optimization, so an answer that calls
something, or that asks for a number too big to hold, would run or hang in the training process. For those tasks only
plain expressions pass; the check parses and never evaluates. It is no sandbox, and it does not bound time: sympy's
`simplify` can take minutes over an allowed answer to an integration task.
"""

from __future__ import annotations

import ast
import math
import re

_PLAIN = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd)
_ARITHMETIC = (*_PLAIN, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div)
_SYMBOLIC = (*_ARITHMETIC, ast.Pow, ast.Call)

_EVALUATED_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
_EVALUATED_MATH = {
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
    "polynomial_multiplication": _SYMBOLIC,
    "simple_integration": _SYMBOLIC,
    "intermediate_integration": _SYMBOLIC,
}
_FRACTION = "coin_flip"
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs".split()
)
_MAX_LIST_CHARACTERS = 20_000
_MAX_MATH_CHARACTERS = 1_000
_MAX_EXPONENT = 64


def is_safe(task: str, answer: str) -> bool:
    """Whether the scorer of the reasoning_gym dataset `task` may be given `answer`; True if the task only compares."""
    if task in _EVALUATED_LISTS:
        return len(answer) <= _MAX_LIST_CHARACTERS and _is_literal(answer)
    if task in _EVALUATED_MATH:
        short = len(answer) <= _MAX_MATH_CHARACTERS and not _has_huge_exponent(answer)
        return short and _is_bounded_math(answer, _EVALUATED_MATH[task])
    return task != _FRACTION or not _has_huge_exponent(answer)


def _has_huge_exponent(text: str) -> bool:
    return re.search(r"[eE][+-]?[\d_]{4,}", text) is not None


def _is_literal(answer: str) -> bool:
    try:
        nodes = ast.walk(ast.parse(answer, mode="eval"))
        return all(isinstance(node, _PLAIN) for node in nodes)
    except (SyntaxError, ValueError):
        return True  # a board or a row of numbers: eval stops at the same error before it runs anything
    except (RecursionError, MemoryError):
        return False


def _is_bounded_math(answer: str, allowed: tuple[type, ...]) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(answer, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # sympy reads more than Python does: what Python cannot parse has not been checked
    return all(isinstance(node, allowed) and _is_bounded(node) for node in nodes)


def _is_bounded(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_small_exponent(node.right) and _powers_in_a_row(node.left) <= 1
    return True


def _is_small_exponent(node: ast.AST) -> bool:
    parts = list(ast.walk(node))
    numbers = [abs(part.value) for part in parts if isinstance(part, ast.Constant) and type(part.value) in (int, float)]
    nested = any(isinstance(part, (ast.Pow, ast.Call)) for part in parts)
    return not nested and math.prod(max(1, number) for number in numbers) <= _MAX_EXPONENT


def _powers_in_a_row(node: ast.AST) -> int:
    deepest = max((_powers_in_a_row(child) for child in ast.iter_child_nodes(node)), default=0)
    return deepest + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
