"""Forked ranks are as ranks that a launcher starts (`ranks`), and forked engines as those that are started
(`engine_forks`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launched_job import Job
from limits import patience
from ranks import HERE, SEARCHED, Ranks, RankServers

from trl_realloc.engines.child_process import session_members


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]


def launch(
    servers: RankServers, folder: Path, code: str, processes: int, grace_s: float = 0.0, **variables: str
) -> Ranks:
    (folder / "script.py").write_text(textwrap.dedent(code))
    (folder / "log.txt").touch()
    environment = {**os.environ, **variables}
    return servers.launch(folder / "script.py", processes, [str(folder)], folder / "log.txt", grace_s, **environment)


def test_a_rank_is_a_process_with_own_session_variables_and_randomness(servers: RankServers, tmp_path: Path) -> None:
    code = """
        import json, os, random, sys
        import numpy
        from pathlib import Path
        found = {"draws": [random.random(), numpy.random.random()], "hash": hash("a name"), "rank": os.environ["RANK"]}
        found |= {"world": os.environ["WORLD_SIZE"], "given": os.environ["GIVEN"], "file": __file__}
        found |= {"session": os.getsid(0) == os.getpid(), "module": __name__, "arguments": sys.argv}
        Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(found))
    """
    assert launch(servers, tmp_path, code, 2, GIVEN="so").wait(patience(60)) == 0, (tmp_path / "log.txt").read_text()
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert first.pop("hash") != second.pop("hash"), "the order of a set is not the same on both"
    for one, other in zip(first.pop("draws"), second.pop("draws"), strict=True):
        assert one != other
    assert (first.pop("rank"), second.pop("rank")) == ("0", "1")
    script = str(tmp_path / "script.py")
    same = {"world": "2", "given": "so", "file": script, "session": True, "module": "__main__"}
    assert first == second == {**same, "arguments": [script, str(tmp_path)]}


def test_one_process_is_no_rank(servers: RankServers, tmp_path: Path) -> None:
    code = "import os; assert not {'RANK', 'WORLD_SIZE', 'MASTER_ADDR'} & os.environ.keys()"
    assert launch(servers, tmp_path, code, 1).wait(patience(60)) == 0, (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(("end", "status"), [("raise ValueError('no')", 1), ("sys.exit(7)", 7), ("os.abort()", -6)])
def test_a_failed_rank_ends_others_after_its_exit(servers: RankServers, tmp_path: Path, end: str, status: int) -> None:
    code = f"""
        import atexit, os, sys, time
        if os.environ["RANK"] == "0":
            time.sleep(200)
        atexit.register(print, "at the exit")
        {end}
    """
    ranks, begun = launch(servers, tmp_path, code, 2), time.monotonic()
    assert ranks.wait(patience(60)) == status
    assert time.monotonic() - begun < patience(60)
    for _, pid in ranks.members:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    log = (tmp_path / "log.txt").read_text()
    assert ("at the exit" in log) == (status > 0)
    assert ("ValueError: no" in log) == (status == 1)


def test_a_rank_that_is_given_time_ends_by_itself_after_anothers_failure(servers: RankServers, tmp_path: Path) -> None:
    code = """
        import os, sys, time
        if os.environ["RANK"] == "0":
            sys.exit(7)
        time.sleep(1)
        print("ended by itself")
    """
    assert launch(servers, tmp_path, code, 2, grace_s=60.0).wait(patience(60)) == 7
    assert "ended by itself" in (tmp_path / "log.txt").read_text()


def test_a_killed_job_leaves_no_process_of_its_ranks(servers: RankServers, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (tmp_path / "sleeps.py").write_text(
        "import subprocess, sys, time\nfrom pathlib import Path\n"
        "child = subprocess.Popen(['sleep', '200'], start_new_session=True)\n"
        "Path(sys.argv[1], f'{child.pid}.pid').touch()\ntime.sleep(200)\n"
    )
    job = Job(folder, str(tmp_path / "sleeps.py"), 2, {}, None, servers=servers)
    end = time.monotonic() + patience(60)
    while len(found := [*folder.glob("*.pid")]) < 2:
        assert time.monotonic() < end and job.process.poll() is None, job.text()
        time.sleep(0.05)
    job.kill()
    job.log.close()
    assert job.gone_within(10), "what they have started in other sessions too"
    assert not any(session_members(int(path.stem)) for path in found)


def test_ranks_of_a_forked_launcher_are_its_children_with_its_variables(servers: RankServers, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (tmp_path / "script.py").write_text(
        "import json, os, sys\nfrom pathlib import Path\n"
        "found = {name: os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'TORCHELASTIC_RUN_ID', 'GIVEN')}\n"
        "found |= {'parent': os.getppid(), 'session': os.getsid(0) == os.getpid(), 'name': __name__}\n"
        "Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(found))\n"
        "sys.exit('ended by itself' if json.loads(sys.argv[2])['fails'] else 0)\n"
    )
    for fails in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GIVEN", "so")
            job = Job(folder, str(tmp_path / "script.py"), 2, {"fails": fails}, None, servers=servers, launched=True)
        assert bool(job.wait(60)) == fails, job.text()
        job.log.close()
        assert ("ended by itself" in job.text()) == fails
        for rank in () if fails else (0, 1):  # one that fails ends the other
            found = json.loads((folder / str(rank)).read_text())
            assert found.pop("TORCHELASTIC_RUN_ID") and found.pop("parent") == job.pid
            assert found == {"RANK": str(rank), "WORLD_SIZE": "2", "GIVEN": "so", "session": True, "name": "__main__"}


def test_a_forked_engine_is_a_child_with_what_it_was_given_and_ends_with_its_owner(tmp_path: Path) -> None:
    (tmp_path / "an_engine.py").write_text(
        "import json, os, sys, time\nfrom trl_realloc.engines.child_process import die_with_parent\n"
        "given = json.loads(sys.argv[1])\ndie_with_parent(given['owner'])\n"
        "print(__name__, os.getcwd(), os.environ['GIVEN'], 'OTHER' in os.environ, os.getsid(0) == os.getpid())\n"
        "os.write(given['fd'], f'{os.getpid()}'.encode())\ntime.sleep(given['sleep_s'])\nsys.exit(given['code'])\n"
    )
    owner = f"""
        import json, os, sys, time
        from engine_forks import EngineForks
        os.environ["OTHER"] = "of the owner"
        forks, (reading, writing) = EngineForks.forked(), os.pipe()
        for code, sleep_s in ((5, 0), (0, 200)):
            given = dict(owner=os.getpid(), fd=writing, sleep_s=sleep_s, code=code)
            command = [sys.executable, "-P", "-m", "an_engine", json.dumps(given)]
            with open({str(tmp_path / "engine.txt")!r}, "ab+") as log:
                engine = forks.spawn(command, dict(GIVEN="so", PYTHONPATH={str(tmp_path)!r}), log, [writing])
            assert os.read(reading, 64) == str(engine.pid).encode()
            print(engine.pid, engine.wait() if code else engine.poll(), flush=True)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), SEARCHED))}
    command = [sys.executable, "-c", textwrap.dedent(owner)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    (ended, code), (running, status) = (line.split() for line in done.stdout.splitlines())
    assert (code, status) == ("5", "None"), done.stderr
    assert (tmp_path / "engine.txt").read_text() == f"__main__ {tmp_path} so False True\n" * 2
    end = time.monotonic() + patience(10)
    while session_members(int(running)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not session_members(int(ended)) and not session_members(int(running))
