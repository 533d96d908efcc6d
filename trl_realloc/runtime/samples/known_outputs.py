"""`KnownOutputs`: the outputs of a scoring call by the token ids of its samples, so that none is computed twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...algorithms.rollout import Rollouts, token_keys


class KnownOutputs:
    """The outputs of one call by the token ids of the samples that it read."""

    def __init__(self) -> None:
        self._outputs = Rollouts()
        self._at: dict[tuple[bytes, bytes], int] = {}

    def add(self, samples: Rollouts, outputs: Rollouts) -> None:
        """Keep the outputs for these samples.

        Args:
            samples: with `prompts` and `responses`.
            outputs: of the same samples in the same order.
        """
        self._keep(token_keys(samples), outputs)

    def _keep(self, keys: Sequence[tuple[bytes, bytes]], outputs: Rollouts) -> None:
        if keys:
            first = len(self._outputs)
            self._outputs = Rollouts.cat([self._outputs, outputs])
            self._at |= {key: first + at for at, key in enumerate(keys)}

    def complete(self, samples: Rollouts, compute: Callable[[Rollouts], Rollouts]) -> Rollouts:
        """The outputs for these samples, in their order.

        Args:
            compute: makes the outputs of those that are not known, of equal ones once. It is also called without any,
                because all ranks run a call together.
        """
        keys = token_keys(samples)
        missing = list({key: at for at, key in enumerate(keys) if key not in self._at}.values())
        self._keep([keys[at] for at in missing], compute(samples.select(missing)))
        return self._outputs.select([self._at[key] for key in keys]) if keys else Rollouts()

    def forget(self) -> None:
        """Forget all of them: the parameters that computed them have changed, or nobody will ask for them again."""
        self._outputs, self._at = Rollouts(), {}
