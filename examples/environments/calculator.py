"""A calculator as a tool: ``--tools examples/environments/calculator.py:calculate``."""

from __future__ import annotations

import ast
import operator

from lightppo import ToolError

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_MOST_LETTERS = 200


def calculate(expression: str) -> str:
    """Compute numbers with + - * / and brackets.

    Args:
        expression: such as 2 * (3 + 4).
    """
    if len(expression) > _MOST_LETTERS:
        raise ToolError(f"at most {_MOST_LETTERS} letters")
    try:
        return f"{_value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ArithmeticError, ValueError) as error:
        raise ToolError(f"cannot compute this: {error}") from error


def _value(node: ast.expr) -> float:
    """Numbers and the four operations; nothing else is run."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r} is no number and no + - * /")
