"""Where the time of `make test` goes: the seconds of each of its runs, and its slowest tests.

    make test && python benchmarks/test_times.py --json benchmarks/results/test_times.json

`make test` writes a file of JUnit's format for each run of pytest. Runs go on side by side, so their seconds add up to
more than those of `make test`. A test's seconds are those of its fixtures too.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import result_file


TIMES = result_file.ROOT / "build" / "test_times"
SLOWEST = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, default=TIMES, help="the folder with the files of the runs")
    parser.add_argument("--json", type=Path, help="the file to write the figures to")
    args = parser.parse_args()
    runs, tests = [], []
    for path in sorted(args.times.glob("*.xml")):
        suite = ElementTree.parse(path).getroot()[0]
        runs.append({"run": path.stem, "tests": int(suite.attrib["tests"]), "seconds": float(suite.attrib["time"])})
        tests += [
            {"test": f"{case.attrib['classname']}::{case.attrib['name']}", "seconds": float(case.attrib["time"])}
            for case in suite.iter("testcase")
        ]
    if not runs:
        parser.error(f"{args.times} has no times; `make test` writes them.")
    slowest = sorted(tests, key=lambda test: -test["seconds"])[:SLOWEST]
    for run in runs:
        print(f"{run['run']:<24} {run['tests']:>6} tests {run['seconds']:>8.0f} s")
    for test in slowest:
        print(f"{test['seconds']:>8.1f} s  {test['test']}")
    if args.json:
        result_file.write(args.json, {"runs": runs, "slowest": slowest, **result_file.about()})


if __name__ == "__main__":
    main()
