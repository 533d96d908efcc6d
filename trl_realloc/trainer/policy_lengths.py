"""`measure_lengths`: how long the prompts of a data set are in tokens, for the planner and for the engines' limits. TRL
tokenizes them later, batch by batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


EXACT = 8_000_000  # characters of a data set of which every prompt is tokenized, as its longest is then known
SAMPLE = 512  # of a larger one, so many prompts are tokenized: the longest by characters, and as many spread over it
READ = 20_000  # most prompts that are looked at
MARGIN = 1.25  # a prompt that was not tokenized may have so many more tokens than the longest that was
ASSUMED = 512  # tokens of a prompt where the data set cannot be read in advance


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts.

    Args:
        mean: tokens of a prompt.
        longest: a bound of the tokens of a prompt; `None` where it is not known.
    """

    mean: float
    longest: int | None


def measure_lengths(dataset: Any, processing_class: Any, template: Mapping[str, Any]) -> Lengths:
    """The lengths of the prompts of a data set.

    Args:
        dataset: with a column `prompt` of text or conversations; otherwise, and if it has no length, nothing is known.
        template: further arguments of the chat template.
    """
    if dataset is None or not hasattr(dataset, "__len__") or "prompt" not in (dataset.column_names or ()):
        return Lengths(ASSUMED, None)
    read = dataset if len(dataset) <= READ else dataset.select(range(0, len(dataset), -(-len(dataset) // READ)))
    prompts = list(read["prompt"])
    by_size = sorted(range(len(prompts)), key=lambda at: len(str(prompts[at])))
    spread = by_size[:: max(1, len(by_size) // SAMPLE)][:SAMPLE]
    is_small = sum(len(str(prompt)) for prompt in prompts) <= EXACT
    chosen = range(len(prompts)) if is_small else {*spread, *by_size[-SAMPLE:]}
    counts = {at: _tokens(prompts[at], processing_class, template) for at in chosen}
    everything = len(counts) == len(dataset)
    longest = max(counts.values(), default=1)
    mean = sum(counts[at] for at in spread) / max(1, len(spread))
    return Lengths(max(1.0, mean), longest if everything else int(longest * MARGIN))


def _tokens(prompt: Any, processing_class: Any, template: Mapping[str, Any]) -> int:
    if isinstance(prompt, str):
        return len(processing_class(text=prompt)["input_ids"])
    ids = processing_class.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template
    )["input_ids"]
    return len(ids)
