"""`KnownOutputs`: outputs of a scoring call that have already been computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...algorithms.rollout import Rollouts, token_keys


class KnownOutputs:
    """Cache of one scoring call's outputs. The keys are the token ids of the samples."""

    def __init__(self) -> None:
        self._outputs = Rollouts()
        self._row_of: dict[tuple[bytes, bytes], int] = {}

    def add(self, samples: Rollouts, outputs: Rollouts) -> None:
        """Cache the outputs for these samples.

        Args:
            samples: columns `prompts` and `responses`.
            outputs: outputs for the same samples in the same order.
        """
        self._keep(token_keys(samples), outputs)

    def _keep(self, keys: Sequence[tuple[bytes, bytes]], outputs: Rollouts) -> None:
        if keys:
            first = len(self._outputs)
            self._outputs = Rollouts.cat([self._outputs, outputs])
            self._row_of |= {key: first + index for index, key in enumerate(keys)}

    def complete(self, samples: Rollouts, compute: Callable[[Rollouts], Rollouts]) -> Rollouts:
        """The outputs for these samples, in their order.

        Args:
            compute: computes the outputs that are not cached; equal samples once. It is also called with no samples,
                because all ranks run a call together.
        """
        keys = token_keys(samples)
        missing = list({key: index for index, key in enumerate(keys) if key not in self._row_of}.values())
        self._keep([keys[index] for index in missing], compute(samples.select(missing)))
        return self._of(keys)

    def get(self, samples: Rollouts) -> Rollouts:
        """The outputs for these samples, in their order. All of them are cached."""
        return self._of(token_keys(samples))

    def _of(self, keys: Sequence[tuple[bytes, bytes]]) -> Rollouts:
        return self._outputs.select([self._row_of[key] for key in keys]) if keys else Rollouts()

    def has(self, samples: Rollouts) -> bool:
        """True if the outputs for all of these samples are cached."""
        return all(key in self._row_of for key in token_keys(samples))

    def forget(self) -> None:
        """Empty the cache, because the parameters have changed."""
        self._outputs, self._row_of = Rollouts(), {}
