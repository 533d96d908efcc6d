"""However a call is laid out, its replicas' shares are the batch, each sample once, with what the call reads."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.algorithms.ppo import PPO
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.batching import balance
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.samples.routes import PrefixAffinity, Share, deal, shares_of_samples, shares_of_training


GRAPH = ppo_graph()
LIMIT = 6
lengths = st.lists(st.integers(1, LIMIT), min_size=1, max_size=12)


def batch(responses: list[int]) -> Rollouts:
    """A global batch with every column of PPO's calls."""
    n, draw = len(responses), torch.Generator().manual_seed(len(responses))
    tokens = Ragged.of([torch.randint(2, 90, (k,), generator=draw) for k in responses], torch.long)

    def numbers(extra: int = 0) -> Ragged:
        return Ragged.of([torch.randn(k + extra, generator=draw) for k in responses], torch.float32)

    return Rollouts(
        index=torch.arange(n),
        prompts=Ragged.of([torch.randint(2, 90, (1 + i % 4,), generator=draw) for i in range(n)], torch.long),
        responses=tokens,
        logprobs=numbers(),
        ref_logprobs=numbers(),
        values=numbers(1),
        scores=torch.randn(n, generator=draw),
        has_eos=tokens.lengths < LIMIT,
    )


def plan_of(devices: int) -> ExecutionPlan:
    return flatten(Cluster(1, devices), generation_engine="transformers")


def sent(share: Share, prompts: Rollouts) -> Share:
    """The share as another rank receives it."""
    return Share.of(share.without(GRAPH.sources).packed()).with_columns_of(prompts)


@given(lengths, st.sampled_from([1, 2, 4, 8]), st.sampled_from([c.name for c in GRAPH.calls if not c.trains]))
def test_the_shares_of_a_call_are_the_batch_and_survive_the_way(responses: list[int], devices: int, call: str) -> None:
    whole, plan = batch(responses), plan_of(devices)
    shares = shares_of_samples(plan, GRAPH.call(call), whole)
    assert len(shares) == plan[call].strategy.dp
    index = torch.cat([share.samples.tensor("index") for share in shares])
    assert sorted(index.tolist()) == list(range(len(whole)))
    for share in shares:
        got = sent(share, whole.only(("index", "prompts"))).samples
        assert set(got) == {"index", *GRAPH.call(call).inputs}
        equal(got, whole.select(share.samples.tensor("index").tolist()))


@given(lengths, st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 3))
def test_the_shares_of_a_training_are_every_mini_batch_and_each_sample_is_sent_once(
    responses: list[int], devices: int, epochs: int, parts: int
) -> None:
    algorithm = PPO(PPOSettings(LIMIT, num_ppo_epochs=epochs, num_mini_batches=min(parts, len(responses))), seed=3)
    whole, plan = algorithm.prepare(batch(responses)), plan_of(devices)
    shares = shares_of_training(plan, GRAPH.call("actor.train"), algorithm, whole, 5)
    received = [sent(share, whole.only(("index", "prompts"))) for share in shares]
    for replica, share in enumerate(received):
        index = share.samples.tensor("index").tolist()
        assert len(set(index)) == len(index)
        (own,) = shares_of_training(plan, GRAPH.call("actor.train"), algorithm, whole, 5, [replica])
        assert own.packed() == shares[replica].packed(), "a replica's share is made alone too"
    own_batches = [list(share.mini_batches()) for share in received]
    for at, mini_batch in enumerate(algorithm.mini_batches(whole, 5)):
        for replica, own in enumerate(balance(mini_batch.lengths.tolist(), devices)):
            equal(own_batches[replica][at], mini_batch.select(own))


def test_replicas_share_the_attention_of_long_samples_too() -> None:
    whole, plan = batch([6, 1, 1, 1]), plan_of(2)  # of 7, 3, 4 and 5 tokens with their prompts
    for call, equal_at, expected in (
        ("reference.forward", math.inf, [[0, 1], [2, 3]]),
        ("reference.forward", 2.0, [[0], [1, 2, 3]]),
    ):
        shares = shares_of_samples(plan, GRAPH.call(call), whole, attention_at=equal_at)
        assert sorted(share.samples.tensor("index").tolist() for share in shares) == expected
    algorithm = PPO(PPOSettings(LIMIT), seed=3)
    train = GRAPH.call("actor.train")
    shares = shares_of_training(plan, train, algorithm, algorithm.prepare(whole), 5, attention_at=2.0)
    steps = [sorted(map(len, step)) for step in zip(*(share.steps for share in shares), strict=True)]
    assert steps and all(step == [1, 3] for step in steps)


def test_a_group_goes_to_one_replica_where_its_prompt_is_computed_once() -> None:
    plan, algorithm, train = (
        plan_of(2),
        PPO(PPOSettings(LIMIT, num_ppo_epochs=1, num_mini_batches=1), seed=3),
        GRAPH.call("actor.train"),
    )
    prompts = Ragged.of([[3 + at // 4] * 40 for at in range(16)], torch.long)
    whole = batch([2] * 16).plus(prompts=prompts)
    for shares_tokens, groups in ((False, 4), (True, 2)):
        for shares in (
            shares_of_samples(plan, GRAPH.call("reference.forward"), whole, shares_tokens=shares_tokens),
            shares_of_training(plan, train, algorithm, algorithm.prepare(whole), 5, shares_tokens=shares_tokens),
        ):
            assert [len(share.samples) for share in shares] == [8, 8]
            of_replica = [{row[0].item() for row in share.samples.ragged("prompts").rows()} for share in shares]
            assert [len(own) for own in of_replica] == [groups, groups]


def equal(got: Rollouts, expected: Rollouts) -> None:
    """The columns of `got` are those of `expected`, to the bit."""
    assert len(got) == len(expected)
    for name, column in got.items():
        other = expected[name]
        if isinstance(column, Ragged):
            assert isinstance(other, Ragged)
            assert torch.equal(column.values, other.values) and torch.equal(column.lengths, other.lengths), name
        else:
            assert torch.equal(column, expected.tensor(name)), name


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 8))
def test_groups_stay_together_as_far_as_no_engine_gets_more_than_its_share(sizes: list[int], engines: int) -> None:
    prompts = [[group, 7] for group, size in enumerate(sizes) for _ in range(size)]
    dealt = deal(Ragged.of(prompts, torch.long), engines)
    assert sorted(at for part in dealt for at in part) == list(range(len(prompts)))
    assert all(part == sorted(part) for part in dealt)
    share = -(-len(prompts) // engines)
    assert max(map(len, dealt)) <= share
    parts_of = [
        {at for at, part in enumerate(dealt) for place in part if prompts[place][0] == g} for g in range(len(sizes))
    ]
    if len(set(sizes)) == 1 and share % sizes[0] == 0:
        assert all(len(parts) == 1 for parts in parts_of), "groups of one size that fit are whole"


@given(st.integers(0, 20), st.integers(1, 6))
def test_different_prompts_are_dealt_in_turn(count: int, engines: int) -> None:
    dealt = deal(Ragged.of([[at] for at in range(count)], torch.long), engines)
    assert dealt == [list(range(first, count, engines)) for first in range(engines)]


@given(st.lists(st.lists(st.integers(1, 2), max_size=3), max_size=30), st.integers(1, 6))
def test_each_run_of_equal_prompts_goes_to_the_engine_with_the_fewest(prompts: list[list[int]], engines: int) -> None:
    ragged = Ragged.of(prompts, torch.long)
    repeats = [at > 0 and prompts[at] == prompts[at - 1] for at in range(len(prompts))]
    assert ragged.repeats().tolist() == repeats
    engine_of = {place: at for at, part in enumerate(deal(ragged, engines)) for place in part}
    counts = [0] * engines
    for place, again in enumerate(repeats):
        if not (again and engine_of[place] == engine_of[place - 1]):
            assert engine_of[place] == counts.index(min(counts))
        counts[engine_of[place]] += 1


turns = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=3), min_size=1, max_size=20)


@given(turns, st.data(), st.integers(1, 5))
def test_the_next_turn_goes_to_the_engine_of_the_turn_before_as_far_as_that_has_room(
    prompts: list[list[int]], data: st.DataObject, engines: int
) -> None:
    """The next turn of some of the prompts begins with the whole prompt of the turn before; other prompts are new."""
    going_on = data.draw(st.lists(st.sampled_from(prompts), max_size=20))
    later = [*([*prompt, 9, at] for at, prompt in enumerate(going_on)), [8], [7, 7]]
    answered, (first, second) = PrefixAffinity(), (Ragged.of(of, torch.long) for of in (prompts, later))
    assert answered.homes(first) == [None] * len(prompts)
    dealt = deal(first, engines)
    answered.remember(first, dealt)
    homes = answered.homes(second)
    assert homes[-2:] == [None, None]
    engines_of = [{at for at, part in enumerate(dealt) for place in part if prompts[place] == p} for p in going_on]
    assert all(home in of_prompt for home, of_prompt in zip(homes, engines_of, strict=False))
    again, most = deal(second, engines, homes), -(-len(later) // engines)
    assert sorted(at for part in again for at in part) == list(range(len(later)))
    assert all(part == sorted(part) and len(part) <= most for part in again)
    for engine, part in enumerate(again):
        stays = [at for at, home in enumerate(homes) if home == engine]
        assert set(stays[:most]) <= set(part), "an engine gets the prompts that it had, up to its share"
