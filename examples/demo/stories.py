"""The demo's language: short counting stories whose right end can be computed, and ends with a flaw.

`Anna has three apples. She finds four more.` ends rightly in `Now she has seven apples.` and in nothing else, so a
completion can be checked word for word. Models and training are in prepare.py and train.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass


NUMBERS = [
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
PRONOUNS = {
    **dict.fromkeys(["Anna", "Clara", "Emma", "Grace", "Ida", "Kate", "Mary", "Olga", "Ruth", "Tina", "Vera"], "she"),
    **dict.fromkeys(["Ben", "David", "Frank", "Henry", "Jack", "Liam", "Noah", "Paul", "Simon", "Tom", "Victor"], "he"),
}
THINGS = [
    "apple", "bean", "book", "button", "card", "coin", "cup", "egg", "flower", "key", "map", "nut", "pear", "pen",
    "plum", "ring", "shell", "stamp", "stone", "toy",
]  # fmt: skip
GAINS = ("buys", "finds", "gets", "makes", "picks", "wins")
LOSSES = ("breaks", "drops", "gives away", "loses", "sells", "throws away")
# How often the policy's training text ends a story so. The right end is not the most frequent one: a policy that is
# sampled greedily repeats the last number, until it is trained not to.
RIGHT = "right"
ENDS = {
    RIGHT: 0.3,
    "last number": 0.5,
    "other number": 0.06,
    "other thing": 0.04,
    "other pronoun": 0.04,
    "repeated": 0.02,
    "broken off": 0.02,
    "unended": 0.02,
}
FLAWS = tuple(kind for kind in ENDS if kind != RIGHT)


@dataclass(frozen=True)
class Story:
    """One counting story.

    Args:
        before: how many things there are at the beginning, 2 to 10.
        change: how many come (positive) or go (negative), 1 to 5.
    """

    name: str
    thing: str
    verb: str
    before: int
    change: int

    @property
    def prompt(self) -> str:
        change = f"{NUMBERS[abs(self.change)]} {'more' if self.change > 0 else 'of them'}"
        start = f"{self.name} has {amount(self.before, self.thing)}."
        return f"{start} {PRONOUNS[self.name].capitalize()} {self.verb} {change}."

    @property
    def end(self) -> str:
        """The only right continuation of `prompt`."""
        return end(PRONOUNS[self.name], self.before + self.change, self.thing)


def amount(count: int, thing: str) -> str:
    return f"{NUMBERS[count]} {thing}{'' if count == 1 else 's'}"


def end(pronoun: str, count: int, thing: str) -> str:
    return f" Now {pronoun} has {amount(count, thing)}."


def draw_story(draw: random.Random) -> Story:
    before = draw.randint(2, 10)
    gains = draw.random() < 0.5
    change = draw.randint(1, 5) if gains else -draw.randint(1, min(before, 5))
    verb = draw.choice(GAINS if gains else LOSSES)
    return Story(draw.choice(sorted(PRONOUNS)), draw.choice(THINGS), verb, before, change)


def flawed_end(story: Story, flaw: str, draw: random.Random) -> tuple[str, bool]:
    """An end with one of `FLAWS`, and whether the story stops after it."""
    pronoun, count, thing = PRONOUNS[story.name], story.before + story.change, story.thing
    match flaw:
        case "last number" if abs(story.change) != count:
            return end(pronoun, abs(story.change), thing), True
        case "last number" | "other number":
            near = [n for n in range(max(0, count - 4), min(20, count + 4) + 1) if n != count]
            return end(pronoun, draw.choice(near), thing), True
        case "other thing":
            return end(pronoun, count, draw.choice([other for other in THINGS if other != thing])), True
        case "other pronoun":
            return end("he" if pronoun == "she" else "she", count, thing), True
        case "repeated":
            return story.end * 2, True
        case "broken off":
            words = story.end.split(" ")
            return " ".join(words[: draw.randrange(2, len(words))]), True
        case "unended":
            return story.end, False
    raise ValueError(f"no flaw {flaw!r}; there are {', '.join(FLAWS)}.")


def any_end(story: Story, draw: random.Random) -> tuple[str, bool]:
    """An end as the policy's training text has it, and whether the story stops after it."""
    kind = draw.choices(list(ENDS), list(ENDS.values()))[0]
    return (story.end, True) if kind == RIGHT else flawed_end(story, kind, draw)


def read_prompt(prompt: str) -> Story:
    """The story of a prompt. Raises `ValueError` where it is none."""
    found = re.fullmatch(r"(\w+) has (\w+) (\w+?)s?\. (?:She|He) ([\w ]+) (\w+) (more|of them)\.", prompt)
    if found is None:
        raise ValueError(f"no counting story: {prompt!r}.")
    name, before, thing, verb, change, direction = found.groups()
    sign = 1 if direction == "more" else -1
    return Story(name, thing, verb, NUMBERS.index(before), sign * NUMBERS.index(change))


def right_end(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """A reward function: 1 for the right end word for word, 0 for anything else."""
    return [
        float(completion == read_prompt(prompt).end) for prompt, completion in zip(prompts, completions, strict=True)
    ]
