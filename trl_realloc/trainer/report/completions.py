"""Formats completions: rows of prompt, response and score, and a table for the terminal. `evaluation` generates
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from ...algorithms.rollout import Rollouts


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CompletionRow = TypedDict("CompletionRow", {"query": str, "model response": str, "score": float})


def completion_rows(samples: Rollouts, processing_class: PreTrainedTokenizerBase) -> list[CompletionRow]:
    """One row per sample, with the columns of TRL's table."""
    queries = processing_class.batch_decode(
        [row.tolist() for row in samples.ragged("prompts").rows()], skip_special_tokens=True
    )
    responses = processing_class.batch_decode([row.tolist() for row in samples.ragged("responses").rows()])
    scores = samples.tensor("scores").tolist()
    return [
        {"query": query, "model response": response, "score": score}
        for query, response, score in zip(queries, responses, scores, strict=True)
    ]


def show_completions(rows: Sequence[CompletionRow], report_to: Sequence[str], step: int) -> None:
    """Print five rows to the terminal, and log all rows to Weights & Biases and Comet if the run reports there, as TRL
    does."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from tqdm import tqdm

    table = Table(*rows[0].keys(), show_lines=True, title=f"completions after update {step}") if rows else Table()
    for row in rows[:5]:
        # rich would read "[/INST]" in a plain string as markup
        table.add_row(Text(row["query"]), Text(row["model response"]), f"{row['score']:.3f}")
    with tqdm.external_write_mode():  # a progress bar may occupy the terminal's line
        Console().print(table)
    if "wandb" in report_to:
        import pandas as pd
        import wandb

        if wandb.run is not None:
            wandb.log({"completions": wandb.Table(dataframe=pd.DataFrame(rows))})
    if "comet_ml" in report_to:
        import pandas as pd

        from ..trl_compat import log_table_to_comet

        log_table_to_comet("completions.csv", pd.DataFrame(rows))
