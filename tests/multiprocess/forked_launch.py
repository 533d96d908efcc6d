"""A launcher that forks its ranks: `forked_launch.py MODULE ARGUMENTS`, as `python -m MODULE ARGUMENTS`, in a process
that `rank_server` has forked.

The launcher is the real one, `accelerate.commands.launch` or `torch.distributed.run`. Where it would start
`python -u script arguments`, which imports everything anew, its child is a fork that runs the script.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rank_server
from engine_forks import ForkedProcess, Forks, fork_forker
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def _be_rank(asked: dict[str, Any]) -> int:
    rank_server.fork_engines()
    return rank_server.run(asked["script"], asked["arguments"])


def main() -> None:
    forks = Forks(fork_forker(_be_rank))  # now, while this process has one thread

    def forked(self: object, command: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        _, unbuffered, script, *arguments = command
        assert unbuffered == "-u", command
        return forks.child(environment, sys.stdout.buffer, [], script=script, arguments=arguments)

    SubprocessHandler._popen = forked  # type: ignore[assignment, method-assign]
    module = sys.argv.pop(1)
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
