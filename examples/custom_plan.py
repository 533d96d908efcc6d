"""A plan of one's own, made of values: GRPO on nodes of eight GPUs. Needs no GPU, no job and no torch.

    python examples/custom_plan.py 2 plan.yaml       # 2 nodes; 512 takes no longer
    trl-realloc show plan.yaml --devices 16

and then `GRPOConfig(..., beta=0.04, plan="plan.yaml")`, or `plan=grpo_plan(Cluster(2, 8))` itself.
"""

import sys

from trl_realloc import Assignment, Cluster, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.cluster import halves


def grpo_plan(cluster: Cluster) -> ExecutionPlan:
    """The policy trains in tensor groups of a node and generates in engines of half a node, which sleep in between. The
    reference scores on one half of the cluster, while the policy's log-probabilities are computed on the other."""
    first, second = halves(cluster)
    node = cluster.devices_per_node
    assignments = {
        "actor.generate": Assignment(
            cluster.mesh, ParallelStrategy(dp=2 * cluster.nodes, tp=node // 2), "vllm", drop=True
        ),
        "reference.forward": Assignment(second, ParallelStrategy(dp=second.size, zero_stage=3), "zero"),
        "actor.forward": Assignment(first, ParallelStrategy(dp=first.size // node, tp=node), "megatron"),
        "actor.train": Assignment(
            cluster.mesh,
            ParallelStrategy(dp=cluster.nodes, tp=node, zero_stage=1, micro_batch_tokens=16384),
            "megatron",
        ),
    }
    return ExecutionPlan(cluster, assignments, grpo_graph(reward_models=False), name="side by side")


if __name__ == "__main__":
    nodes, path = int(sys.argv[1]), sys.argv[2]
    grpo_plan(Cluster(nodes, devices_per_node=8)).save(path)
    print(f"{path}: GRPO on {nodes} nodes of 8")
    assert "torch" not in sys.modules
