"""Measured part of `staleness`: real runs under the plan `separate`, with vLLM engines and samples of skewed lengths.

`run` starts the processes of one job; this file is also their program. A job of phases runs iterations with one
staleness after another, on the same engines and models. A job of a training runs `PPOTrainer.train`, saves, and may be
killed. What is counted is counted on the ranks that generate, and compared with the samples that rank 0 has trained on.
The tables and the commands are in `staleness`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from skewed import Skewed, tokenizer
from staleness_expected import Expectation


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trl_realloc.common.ports import reserve_port  # noqa: E402


SKEWED = Skewed(hidden=128, layers=2, limit=320, prompt=24, short_mean=16)
PER_ENGINE = 48  # samples of an engine
RATE = 1e-6  # parameters change in every update, lengths hardly do
MOST = 4  # versions; the engines are made for them
STOPPED_S, RUNNING_S = 0.06, 0.02  # of a slow engine, in turn
LIMIT_S = 900.0  # of a job


# --- one rank ---------------------------------------------------------------------------------------------------------


def _trainer(folder: Path, processes: int, skewed: Skewed = SKEWED, **changes: Any) -> Any:
    from datasets import Dataset

    from trl_realloc import PPOConfig, PPOTrainer

    episodes = PER_ENGINE * processes // 2
    settings: dict[str, Any] = {
        "max_steps": 1,
        "max_staleness": MOST,
        "save_strategy": "no",
        "num_ppo_epochs": 1,
        **changes,
    }
    arguments = PPOConfig(
        output_dir=str(folder),
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=PER_ENGINE // 2,
        response_length=skewed.limit,
        stop_token="eos",
        temperature=1.0,
        learning_rate=RATE,
        gradient_checkpointing=False,
        num_sample_generations=0,
        generation_engine="vllm",
        plan="separate",
        vllm_importance_sampling_correction=True,
        **settings,
    )
    policy, critic, reward = skewed.models()
    return PPOTrainer(
        args=arguments,
        processing_class=tokenizer(),
        model=policy,
        ref_model=skewed.models()[0],
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": skewed.prompts(32 * episodes, 0)}),
    )


@dataclass
class Drawn:
    """A sample whose generation has ended on this rank.

    Args:
        tokens: of its response.
        begun: of these, tokens that it had when it was admitted.
    """

    step: int
    index: int
    tokens: int
    begun: int


class Counter:
    """Notes every sample that this rank's engine ends, whatever becomes of it.

    Args:
        file: gets a line for each of them at once, for a process that is killed.
    """

    def __init__(self, file: Path | None = None) -> None:
        from trl_realloc.runtime.overlap.in_flight import BatchInFlight, sample_of

        self.drawn: list[Drawn] = []
        begun: dict[tuple[int, int], int] = {}
        admit, end = BatchInFlight.admit, BatchInFlight.end

        def counted_admit(batch: BatchInFlight, *args: Any) -> Any:
            requests = admit(batch, *args)
            for request in requests:
                begun[sample_of(request.index)] = len(request.begun.token_ids) if request.begun else 0
            return requests

        def counted_end(batch: BatchInFlight, index: int, completion: Any, at: float) -> None:
            tokens = len(completion.token_ids)
            self.drawn.append(Drawn(batch.number, index, tokens, begun.get((batch.number, index), 0)))
            if file is not None:
                with file.open("a") as lines:
                    lines.write(json.dumps(vars(self.drawn[-1])) + "\n")
            end(batch, index, completion, at)

        BatchInFlight.admit = counted_admit  # type: ignore[method-assign]
        BatchInFlight.end = counted_end  # type: ignore[method-assign]

    def take(self) -> list[dict[str, int]]:
        taken, self.drawn = self.drawn, []
        return [vars(sample) for sample in taken]


def _update(iteration: Any, step: int) -> dict[str, Any]:
    """What rank 0 notes of an update."""
    from trl_realloc.runtime.samples.results import POLICY_VERSIONS

    samples = iteration.samples
    rows = samples.ragged("responses").rows()
    ages = [0] * sum(map(len, rows))
    if POLICY_VERSIONS in samples:
        ages = (step - samples.ragged(POLICY_VERSIONS).values).tolist()
    return {
        "step": step,
        "ended": time.time(),
        "lengths": [len(row) for row in rows],
        "mean_age": sum(ages) / len(ages),
        "ages": {age: ages.count(age) for age in sorted(set(ages))},
        "tokens": sum(map(len, rows)),
        "metrics": {**iteration.observed, **iteration.metrics},
        "spans": [(s.call, s.device, s.start, s.end) for s in iteration.spans],
    }


class Phases:
    """Runs iterations with one staleness after another on the same engines.

    Between two phases everything is given up that is under way. The number of updates begins anew, so that phases have
    the same prompts and seeds.

    Args:
        skewed: what differs from `SKEWED`.
        epochs: of the training.
        measures: measure the machine first, and compare each phase with what the planner expects.
    """

    def __init__(
        self,
        folder: Path,
        processes: int,
        *,
        skewed: dict[str, int] | None = None,
        epochs: int = 1,
        measures: bool = False,
    ) -> None:
        self.skewed = replace(SKEWED, **(skewed or {}))
        self.trainer = _trainer(folder, processes, self.skewed, num_ppo_epochs=epochs)
        self.expectation = Expectation(self.trainer.setup.job) if measures else None
        self.trainer.run.placed.start()
        self.executor, self.placement = self.trainer.executor, self.trainer.placement
        self.plan, self.ahead, self.counter = self.trainer.plan, self.trainer.executor.ahead, Counter()
        self.episodes = PER_ENGINE * processes // 2

    def run(
        self,
        versions: int,
        updates: int,
        *,
        ends: bool,
        streams: Any = None,
        slow_rank: int | None = None,
        fill: int = 0,
    ) -> dict[str, Any]:
        """Run a phase.

        Args:
            streams: as in a plan's file; by default none.
            ends: whether the run ends with the phase's last update; otherwise later batches are begun, and given up.
            slow_rank: whose engine is slow.
            fill: updates whose lengths are not those of the expectation.

        Returns:
            `drawn` on ranks that generate, `updates` on rank 0, and there `expected` if the job measures.
        """
        from trl_realloc.plan.dataflow import Role

        self._use(versions, streams)
        rates, noted = dict.fromkeys((Role.ACTOR, Role.CRITIC), RATE), []
        batches = [self._batch(step) for step in range(updates if ends else updates + MOST + 1)]
        with self._slow(slow_rank):
            for step in range(updates):
                following = batches[step + 1 : step + 2 + versions]
                iteration = self.executor.run(batches[step], step, rates, following=following)
                if not self.trainer.accelerator.process_index:
                    noted.append(_update(iteration, step))
        self.executor.cancel_early()
        result = {"updates": noted, "drawn": self.counter.take()}
        if self.expectation is not None and noted:
            if not versions:
                self.expectation.learn(self.executor.plan, noted)
            result["expected"] = self.expectation.of(self.executor.plan, noted[fill:])
        return result

    def _use(self, versions: int, streams: Any) -> None:
        from trl_realloc.plan.staleness import Staleness
        from trl_realloc.plan.streams import Streams
        from trl_realloc.runtime.overlap.ahead_runs import AheadRuns

        executor = self.executor
        executor.cancel_early()
        self.ahead.batches.give_up()
        executor.exchange.flush()
        self.trainer.accelerator.wait_for_everyone()
        plan = replace(self.plan, staleness=Staleness(versions), streams=Streams.from_dict(streams))
        executor.plan = self.placement.plan = executor.exchange.plan = plan
        executor.ahead = None
        if versions:
            executor.ahead = AheadRuns(self.placement, executor.alarm, executor.runner, executor.exchange)
            # so that its messages have the tags of no other phase
            executor.ahead.batches.restarts = self.ahead.batches.restarts
            self.ahead = executor.ahead

    def _batch(self, step: int) -> Any:
        from trl_realloc.algorithms.prompt_batches import PromptBatch
        from trl_realloc.algorithms.rollout import Ragged, Rollouts

        rows = self.skewed.prompts(self.episodes, 1 + step)
        prompts = Rollouts(index=torch.arange(len(rows)), prompts=Ragged.of(rows, torch.long))
        return PromptBatch(prompts, [{}] * len(rows))

    @contextlib.contextmanager
    def _slow(self, rank: int | None) -> Iterator[None]:
        """Have the engine of a rank run for a quarter of the time."""
        if rank != self.trainer.accelerator.process_index:
            yield
            return
        (engine,) = self.placement.generators.values()
        over = threading.Event()

        def interrupt() -> None:
            while not over.wait(RUNNING_S):
                os.kill(engine._process.pid, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                os.kill(engine._process.pid, signal.SIGCONT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _phases(options: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    ranks = Phases(folder / "run", options["processes"], **options.get("of_phases", {}))
    results = [ranks.run(**phase) for phase in options["phases"]]
    ranks.trainer.run.placed.end_together()
    ranks.trainer.close()
    return results


def _train(options: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """A training of the skewed policy, or of the demo's task if the options name its models."""
    counter = Counter(folder / f"ended-{os.environ['RANK']}.jsonl")
    if assets := options.get("assets"):
        import staleness_learning

        args = staleness_learning.arguments(folder / "run", **options["config"])
        made: Any = staleness_learning.trainer(Path(assets), args)
    else:
        made = _trainer(folder / "run", options["processes"], **options["config"])
    execute, noted = made.executor.run, []

    def run(batch: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        iteration = execute(batch, step, *args, **kwargs)
        if "responses" in iteration.samples and step < made.args.max_steps:
            noted.append(_update(iteration, step))
        return iteration

    made.executor.run = run
    _note_drawn_when_saved(made.executor, folder, os.environ["RANK"])
    made.train(resume_from_checkpoint=options.get("resume"))
    result = {"updates": noted, "drawn": counter.take()}
    if made.eval_dataset is not None:
        result["evaluation"] = made.evaluate()
    made.run.placed.end_together()
    made.close()
    return [result]


def _note_drawn_when_saved(executor: Any, folder: Path, rank: str) -> None:
    """Have a rank that generates write, right after what has been drawn was taken for a checkpoint, what its engine has
    drawn then: the tokens of samples that have not ended, and which samples have. A sample that was admitted and that
    the engine no longer generates has ended, whether or not the rank has been told. Each checkpoint has its own file,
    because the job may save the next one before it is killed."""
    from trl_realloc.runtime.overlap.in_flight import sample_of

    take = executor.samples_under_way

    def taken(step: int) -> Any:
        result = take(step)
        batches = None if executor.ahead is None else executor.ahead.batches
        if batches is not None and batches._generation is not None:
            unfinished = {sample_of(each.index): len(each.token_ids) for each in batches._generation.peek()}
            admitted = [
                (batch.number, index)
                for batch in batches.in_flight.values()
                if batch.is_admitted and batch.number >= step
                for index in batch.samples.tensor("index").tolist()
            ]
            ended = [sample for sample in admitted if sample not in unfinished]
            note = json.dumps({"unfinished": list(unfinished.items()), "ended": ended})
            (folder / f"saved-{rank}-{step}.json").write_text(note)
        return result

    executor.samples_under_way = taken


def _rank(folder: Path) -> None:
    options = json.loads((folder / "options.json").read_text())
    torch.set_num_threads(1)
    results = (_phases if "phases" in options else _train)(options, folder)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(results))


# --- the job ----------------------------------------------------------------------------------------------------------


def run(folder: Path, options: dict[str, Any], ended: Callable[[], bool] | None = None) -> list[dict[str, Any]] | None:
    """Run a job in a folder, in which its ranks write.

    Args:
        options: `processes`, and `phases` (arguments of `Phases.run`), with those of `Phases` in `of_phases`, or
            `config` (of a training), with `resume` and `assets` if wanted.
        ended: the job is killed (SIGKILL) as soon as this is true.

    Returns:
        By phase the ranks' notes together: `updates`, and `drawn` of all ranks. `None` of a job that was killed.

    Raises:
        SystemExit: the job failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.json").write_text(json.dumps(options))
    port, _ = reserve_port()
    ranks, log = [], (folder / "log").open("w")
    for rank in range(options["processes"]):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"WORLD_SIZE": str(options["processes"]), "LOCAL_WORLD_SIZE": str(options["processes"])},
            **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"},
        }
        command = [sys.executable, __file__, str(folder)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        if not _wait(ranks, ended):
            return None
    finally:
        for process in ranks:
            process.kill()
        log.close()
    if any(process.wait() for process in ranks):
        sys.exit(f"the job in {folder} failed:\n{(folder / 'log').read_text()[-4000:]}")
    return _together([json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(ranks))])


def _wait(ranks: list[subprocess.Popen[bytes]], ended: Callable[[], bool] | None) -> bool:
    """Wait for the job's end. Returns False if it is to be killed."""
    deadline = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in ranks):
        if ended is not None and ended():
            return False
        if any(process.poll() for process in ranks) or time.monotonic() > deadline:
            time.sleep(5.0)  # for the other ranks' messages
            return True
        time.sleep(0.02)
    return True


def _together(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {**parts[0], "drawn": [sample for part in parts for sample in part["drawn"]]}
        for parts in zip(*ranks, strict=True)
    ]


@contextlib.contextmanager
def job_folder(kept: Path | None, name: str) -> Iterator[Path]:
    """A folder for a job: in `kept`, or a temporary one."""
    if kept is not None:
        yield kept / name
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
