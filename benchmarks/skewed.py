"""A small policy whose responses have a long tail, its tokenizer and its prompts. The benchmarks of streams and of
staleness use them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


VOCABULARY, HEAD = 1000, 64  # tokens; width of an attention head
PAD, EOS, LONG_WORDS = 0, 1, 500  # words from LONG_WORDS on are those of long responses


@dataclass(frozen=True)
class Skewed:
    """Sizes of the models and of their samples.

    Args:
        limit, prompt: most tokens of a response, tokens of a prompt.
        short_mean: mean tokens of a short response. A long one has a mean of twice the limit, if there were none.
        long_share: of the prompts ask for a long response.
        scorer_hidden: hidden size of critic and reward model if it is not the policy's.
    """

    hidden: int = 256
    layers: int = 4
    limit: int = 768
    prompt: int = 64
    short_mean: int = 32
    long_share: float = 1 / 48
    scorer_hidden: int | None = None

    def models(self) -> tuple[Any, Any, Any]:
        """Policy, and a model each for critic and reward, all of one depth.

        A response stays among the words of the prompt's last word: long words have channel 1 of the residual stream
        set, and the eos token's logit depends on it. So a response is long if the prompt's last word is. Both lengths
        are geometrically distributed. Channels 0 and 1 are kept as the embedding sets them.
        """
        from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

        def config(hidden: int) -> LlamaConfig:
            return LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=hidden,
                intermediate_size=hidden * 11 // 4,
                num_hidden_layers=self.layers,
                num_attention_heads=hidden // HEAD,
                num_key_value_heads=hidden // HEAD,
                max_position_embeddings=2048,
                pad_token_id=PAD,
                eos_token_id=EOS,
                bos_token_id=None,
                num_labels=1,
            )

        torch.manual_seed(0)
        policy = LlamaForCausalLM(config(self.hidden))
        channel = math.sqrt(self.hidden)  # channel 0 after the norm if it is the only large one
        never, words, long_words = -20.0, LONG_WORDS - 2, VOCABULARY - LONG_WORDS
        with torch.no_grad():
            embedding, head = policy.model.embed_tokens.weight, policy.lm_head.weight
            embedding[:, 0], embedding[:, 1], embedding[LONG_WORDS:, 1] = 10.0, 0.0, 10.0
            for layer in policy.model.layers:
                layer.self_attn.o_proj.weight[:2] = 0
                layer.mlp.down_proj.weight[:2] = 0

            def set_logits(tokens: slice | int, after_word: float, after_long_word: float) -> None:
                head[tokens, 0] = after_word / channel
                head[tokens, 1] = after_long_word * math.sqrt(2) / channel - after_word / channel

            set_logits(slice(2, LONG_WORDS), 0.0, never)
            set_logits(slice(LONG_WORDS, VOCABULARY), never, 0.0)
            short, long = math.log(words / (self.short_mean - 1)), math.log(long_words / (2 * self.limit - 1))
            set_logits(EOS, short, long)
            set_logits(PAD, never, never)
        scorer = config(self.scorer_hidden or self.hidden)
        return policy, LlamaForSequenceClassification(scorer), LlamaForSequenceClassification(scorer)

    def prompts(self, episodes: int, seed: int) -> list[list[int]]:
        """The prompts of a batch. `long_share` of them, anywhere in the batch, end in a long word."""
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randint(2, LONG_WORDS, (episodes, self.prompt), generator=draw)
        long_rows = torch.randperm(episodes, generator=draw)[: round(self.long_share * episodes)]
        rows[long_rows, -1] += VOCABULARY - LONG_WORDS
        answer: list[list[int]] = rows.tolist()
        return answer


def tokenizer() -> Any:
    """One token for each word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    words_only = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
