"""Runs TRL's own GRPO and RLOO tests, with TRL's classes or with this package's in their places.

    python tests/trainer/run_trl_grpo_tests.py [--ours] [--tests FOLDER] [--rows N] [--set NAME=VALUE]
        [--json FILE] [--before FILE] [options of pytest]

FOLDER is `tests` of a checkout of TRL's repository. Without it the tests are looked for where `trl_sources.py` says.
The models, tokenizers and data sets that the tests name by their place on the Hub are made here. Tests train on 17
rows; `--rows 4` takes fewer, for a shorter run. `--set tool_workers=8` gives every config this value. `--json` writes
every outcome; `--before` names such a file of another run, and lists the tests that passed in it and do not pass now.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

from trl_data import TRAIN_ROWS
from trl_sources import find_files
from trl_test_run import run_files, table


FILES = ("test_grpo_trainer.py", "test_rloo_trainer.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ours", action="store_true", help="with the classes of trl_realloc")
    parser.add_argument("--tests", type=Path, help="the folder `tests` of a checkout of TRL's repository")
    parser.add_argument("--rows", type=int, default=TRAIN_ROWS, help="how many rows to train on, 17 if not given")
    parser.add_argument("--set", help="a setting of every config, as NAME=VALUE with VALUE in JSON")
    parser.add_argument("--json", type=Path, help="where to write every outcome")
    parser.add_argument("--before", type=Path, help="the --json file of a run to compare with")
    arguments, options = parser.parse_known_args()
    files = find_files(arguments.tests)
    classes = "trl_realloc" if arguments.ours else None
    outcomes = run_files(
        files,
        FILES,
        classes=classes,
        rows=arguments.rows,
        setting=arguments.set or "",
        options=["-q", "--tb=short", "--timeout=300", *options],
    )
    print(f"\nTRL {version('trl')}, tests of TRL {files.release}, classes of {classes or 'trl'}")
    print(table(outcomes))
    if arguments.json:
        told = {"trl": version("trl"), "tests_of": files.release, "classes": classes or "trl", "outcomes": outcomes}
        arguments.json.write_text(json.dumps(told, indent=1))
    failed = {test for test, told in outcomes.items() if told["outcome"] == "failed"}
    if arguments.before:
        before = json.loads(arguments.before.read_text())["outcomes"]
        passed = {test for test, told in before.items() if told["outcome"] == "passed"}
        failed = {test for test in passed if outcomes.get(test, {}).get("outcome") != "passed"}
        print(f"\npassed in {arguments.before} and not now, {len(failed)}:", *sorted(failed), sep="\n    ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
