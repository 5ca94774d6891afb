"""The Slurm example, with an ``srun`` that starts a batch's tasks on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prorl"
SRUN = """#!/usr/bin/env bash
# As many tasks as --ntasks says, each with its SLURM_NODEID; ends them when it is ended.
tasks=1
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) tasks=${1#--ntasks=} ;; --output=*) output=${1#--output=} ;; esac
    shift
done
children=()
trap 'kill "${children[@]}" 2>/dev/null; wait; exit 0' TERM
for ((task = 0; task < tasks; task++)); do
    if [[ -n ${output:-} ]]; then
        SLURM_NODEID=$task "$@" > "${output/\\%t/$task}" 2>&1 &
    else
        SLURM_NODEID=$task "$@" &
    fi
    children+=($!)
done
wait
"""


def test_trainer_gets_the_urls_of_one_server_per_node(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    main = (
        f"#!/usr/bin/env bash\nexec {sys.executable} -c 'from nemo_gym.cli.prorl_server import main; main()' \"$@\"\n"
    )
    (programs / "ng_prorl_server").write_text(main)
    for program in programs.iterdir():
        program.chmod(0o755)
    trainer = (
        "import asyncio, os; from nemo_gym.prorl.client import ProRLClient\n"
        "async def ask():\n"
        "    async with ProRLClient() as client:\n"
        "        for url, told in (await client.status()).items():\n"
        "            print(url, told['running'], told['max_run_workers'])\n"
        "asyncio.run(ask())\n"
    )
    (tmp_path / "train.py").write_text(trainer)
    env = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PRORL_EXAMPLES": str(EXAMPLES),
        "PRORL_HOST": "127.0.0.1",
        "PRORL_PORT": "0",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "SERVER": "max_run_workers=3",
        "COMMAND": f"{sys.executable} train.py",
    }
    job = subprocess.Popen(
        [str(EXAMPLES / "ray.sub")],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = job.communicate(timeout=120)
    except BaseException:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    assert job.returncode == 0, errors
    lines = said.splitlines()
    assert len(lines) == 2 and all(line.endswith(" True 3") for line in lines)
    assert (tmp_path / "prorl-7" / "token").stat().st_mode & 0o077 == 0
