"""Questions of arithmetic, the reward for their answers, and a calculator that a model can call."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from datasets import Dataset


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def questions(count: int = 4000, seed: int = 0) -> Dataset:
    """Prompts as conversations, with the right answer in the column `answer`."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        a, b, c = draw.randint(2, 99), draw.randint(2, 99), draw.randint(2, 999)
        question = f"What is {a} * {b} + {c}? End with the number."
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": a * b + c})
    return Dataset.from_list(rows)


def right_answer(completions: list[list[dict[str, Any]]], answer: list[int], **columns: object) -> list[float]:
    """A reward function: 1 where the last number of the last message is the answer, 0 elsewhere."""
    rewards = []
    for messages, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", str(messages[-1].get("content") or "").replace(",", ""))
        rewards.append(float(bool(numbers) and int(numbers[-1]) == expected))
    return rewards


def calculate(expression: str) -> float:
    """
    Calculates an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, such as "(3 + 4) * 2".

    Returns:
        The value of the expression.
    """
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.AST) -> float:
    """Raises `ValueError` for anything but numbers and `OPERATORS`; TRL shows the model the error."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value: float = OPERATORS[type(op)](_value(left), _value(right))
            return value
    raise ValueError("only numbers, + - * / and parentheses can be calculated")
