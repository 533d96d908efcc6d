"""Undoes, and prevents, the partitioning of models by `deepspeed.zero.Init` at their creation.

In a job launched with ZeRO-3, Transformers creates every model under `deepspeed.zero.Init`, partitioned over all ranks
of the job and in the dtype of DeepSpeed's config. A plan may need the model on other ranks or in another layout.
Partitioning a model over the mesh that trains it is in `zero`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.integrations import deepspeed as integration


def gathered(model: Any) -> Any:
    """Replace a module's partitioned parameters with full ones in host memory, in place: the `Parameter` objects, which
    a user's optimizer may have, stay. Anything else is returned unchanged. Collective over the ranks that share the
    model.

    Parameters are gathered one at a time, so a device has memory for one full parameter at most.
    """
    if not isinstance(model, nn.Module):
        return model
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    for parameter in partitioned:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            whole = parameter.data.to("cpu", copy=True)
        # the attributes by which DeepSpeed recognizes a partitioned parameter
        for name, value in list(vars(parameter).items()):
            if name.startswith("ds_") or callable(value) or name in ("nvme_swapper", "is_external_param"):
                delattr(parameter, name)
        parameter.data = whole
    return model


@contextlib.contextmanager
def created_whole() -> Iterator[None]:
    """Inside, Transformers creates and loads models as without ZeRO-3. Partitioning is a collective over the whole job,
    but only the ranks of a role's meshes create its model."""
    config = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = config
