"""Models that DeepSpeed partitions as they are created: made whole, or not partitioned to begin with.

Launched with ZeRO-3, Transformers creates every model under `deepspeed.zero.Init`, over all ranks of the job and in the
dtype that DeepSpeed's config computes in. A plan may want the model on other ranks, in another layout or whole.
Partitioning a model for the mesh that it trains on is the engine's business (`zero`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.integrations import deepspeed as integration


def gathered(model: Any) -> Any:
    """The given model with whole parameters, in host memory. In place: its parameters remain the objects that a user's
    optimizer has. What is not a partitioned module is left as it is. Collective over the ranks that share it.

    One parameter at a time, so a device never holds more than one whole.
    """
    if not isinstance(model, nn.Module):
        return model
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    for parameter in partitioned:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            whole = parameter.data.to("cpu", copy=True)
        for name, value in list(vars(parameter).items()):  # by these DeepSpeed knows a partitioned parameter
            if name.startswith("ds_") or callable(value) or name in ("nvme_swapper", "is_external_param"):
                delattr(parameter, name)
        parameter.data = whole
    return model


@contextlib.contextmanager
def created_whole() -> Iterator[None]:
    """Inside, Transformers creates and loads models as it does without ZeRO-3, on each rank by itself: partitioning is
    a collective of the whole job, and a role's model is created on the ranks of its meshes alone."""
    config = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = config
