"""Plans for 4,096 devices on a laptop: the planning half of the package needs no GPU, no job and no torch.

python examples/plan_4096_devices.py
"""

import sys

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import flatten, interleave


cluster = Cluster(nodes=512, devices_per_node=8)
for preset in (flatten, interleave):
    plan = preset(cluster, zero_stage=3)
    print(plan.to_yaml())
assert "torch" not in sys.modules
