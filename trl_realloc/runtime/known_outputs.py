"""`KnownOutputs`: the outputs of a scoring call by the token ids of its samples, so that none is computed twice."""

from __future__ import annotations

from collections.abc import Sequence

from ..algorithms.rollout import Rollouts


Key = tuple[bytes, bytes]


class KnownOutputs:
    """The outputs of one call by the token ids of the samples that it read."""

    def __init__(self) -> None:
        self._outputs = Rollouts()
        self._at: dict[Key, int] = {}

    def add(self, samples: Rollouts, outputs: Rollouts) -> None:
        """Keep the outputs for these samples.

        Args:
            samples: with `prompts` and `responses`.
            outputs: of the same samples in the same order.
        """
        if not len(samples):
            return
        first = len(self._outputs)
        self._outputs = Rollouts.cat([self._outputs, outputs])
        self._at |= {key: first + at for at, key in enumerate(_keys(samples))}

    def missing(self, samples: Rollouts) -> list[int]:
        """The positions of the samples whose outputs are not known; of equal ones the last."""
        by_key = {key: at for at, key in enumerate(_keys(samples))}
        return [at for key, at in by_key.items() if key not in self._at]

    def of(self, samples: Rollouts) -> Rollouts:
        """The outputs for these samples, all of which are known, in their order."""
        return self._outputs.select([self._at[key] for key in _keys(samples)])

    def forget(self) -> None:
        """Forget all of them: the parameters that computed them have changed, or nobody will ask for them again."""
        self._outputs, self._at = Rollouts(), {}


def _keys(samples: Rollouts) -> Sequence[Key]:
    if not len(samples):
        return []
    columns = (samples.ragged(name).rows() for name in ("prompts", "responses"))
    return [(prompt.numpy().tobytes(), response.numpy().tobytes()) for prompt, response in zip(*columns, strict=True)]
