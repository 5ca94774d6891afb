"""Real inference engines as processes of a test, each in the environment that ``scripts/install-engines`` made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import orjson

from nemo_gym_testing.gateway.tiny import make_policy

INSTALL = Path(__file__).resolve().parents[3] / "scripts" / "install-engines"
PROGRAM = Path(__file__).with_name("real_policy.py")
GGUF_PROGRAM = Path(__file__).with_name("gguf_policy.py")
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


class EngineMissingError(RuntimeError):
    """An engine is not installed; the message says how to install it."""


def python_of(engine: str) -> Path:
    """The Python of an installed engine. Raises `EngineMissingError`."""
    found = subprocess.run([INSTALL, "--python", engine], capture_output=True, text=True, check=False)
    if found.returncode:
        raise EngineMissingError(found.stderr.strip())
    return Path(found.stdout.strip())


def make_real_policy(
    folder: Path,
    *,
    family: str = "chatml_think",
    seed: int = 0,
    architecture: str = "qwen3",
    window: int | None = None,
) -> Path:
    """Make a policy of a million random parameters (131,072 positions) for real engines and the gateway. Takes 10 s.

    ``architecture``: ``qwen3``, or ``gemma3``, whose window llama.cpp supports, too. ``window``: tokens that attention
    sees, default all (gemma3: 512); with a window, what is learnt from short conversations also holds in long ones.
    """
    make_policy(folder, family, seed)
    (folder / "model.npz").unlink()
    words = ("--window", str(window)) if window is not None else ()
    _run_program("weights", str(folder), "--seed", str(seed), "--architecture", architecture, *words)
    return folder


def write_gguf(policy: Path, file: Path) -> Path:
    """Write ``policy``, of architecture ``gemma3``, as the one file that llama.cpp loads."""
    _run("llama-cpp", GGUF_PROGRAM, str(policy), str(file))
    return file


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation as tokens, and which of them the policy writes."""

    ids: list[int]
    said: list[int]
    """1 or 0 for each of ``ids``."""


def warm_start(folder: Path, demonstrations: Iterable[Demonstration]) -> None:
    """Train the policy of `make_real_policy` on demonstrations, in order, eight per step."""
    lines = b"".join(orjson.dumps(asdict(one)) + b"\n" for one in demonstrations)
    _run_program("imitate", str(folder), given=lines)


def recomputed_logprobs(folder: Path, sequences: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """Recompute each token's logprob given the tokens before it, with ``transformers`` in float32; ``None`` first."""
    lines = b"".join(orjson.dumps(list(ids)) + b"\n" for ids in sequences)
    return [orjson.loads(line) for line in _run_program("logprobs", str(folder), given=lines).splitlines()]


def _run_program(*words: str, given: bytes | None = None) -> bytes:
    return _run("vllm", PROGRAM, *words, given=given)


def _run(engine: str, program: Path, *words: str, given: bytes | None = None) -> bytes:
    done = subprocess.run([python_of(engine), program, *words], input=given, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.name} {words[0]} failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout


@contextlib.asynccontextmanager
async def vllm_server(
    policy: Path, log: Path, *words: str, max_model_len: int = 16_384, development: bool = False
) -> AsyncIterator[str]:
    """Run vLLM over ``policy`` on the CPU, in float32, as the model ``tiny``; yield its URL. ``words``: more
    arguments. ``development``: also serve trainer routes such as ``/collective_rpc``, which replaces weights in place.

    Raises `EngineMissingError`; `RuntimeError` with the end of the log if vLLM does not start.
    """
    port = _free_port()
    command = [
        *(str(python_of("vllm").with_name("vllm")), "serve", str(policy), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)),
        *("--dtype", "float32", "--enforce-eager", *words),
    ]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_SERVER_DEV_MODE": str(int(development)),
    }
    async with _serving(command, settings, f"http://127.0.0.1:{port}", "/health", log) as url:
        yield url


@contextlib.asynccontextmanager
async def transformers_server(policy: Path, log: Path, *words: str) -> AsyncIterator[str]:
    """Run ``transformers serve`` over ``policy`` on the CPU, in float32, as the model ``str(policy)``, the only name
    it knows; yield its URL. ``words``: more arguments.

    Its cache of models does not exist, as on a new machine: listing models then fails, but this model is served.
    Raises `EngineMissingError`; `RuntimeError` with the end of the log if the server does not start.
    """
    port = _free_port()
    command = [
        *(str(python_of("transformers").with_name("transformers")), "serve", str(policy)),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32", *words),
    ]
    settings = {"HF_HOME": str(log.parent / "no-cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    async with _serving(command, settings, f"http://127.0.0.1:{port}", "/health", log) as url:
        yield url


@contextlib.asynccontextmanager
async def llama_server(file: Path, log: Path, *words: str, parallel: int = 2, context: int = 0) -> AsyncIterator[str]:
    """Run llama.cpp's server over a GGUF file, as the model ``tiny``; yield its URL. ``words``: more arguments;
    ``parallel``: concurrent calls; ``context``: tokens of each call, by default the policy's positions.

    Raises `EngineMissingError`; `RuntimeError` with the end of the log if the server does not start.
    """
    port = _free_port()
    command = [
        *(str(python_of("llama-cpp").with_name("llama-server")), "--model", str(file), "--alias", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--threads", "1", "--parallel", str(parallel)),
        *("--ctx-size", str(context * parallel), "--jinja", "--metrics", "--no-warmup", *words),
    ]
    async with _serving(command, {}, f"http://127.0.0.1:{port}", "/health", log) as url:
        yield url


@contextlib.asynccontextmanager
async def _serving(
    command: Sequence[str], settings: dict[str, str], url: str, health: str, log: Path
) -> AsyncIterator[str]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **settings},
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as http:
            while not await _answers(http, url + health):
                if process.returncode is not None:
                    log_end = log.read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"{command[0]} ended with {process.returncode}:\n{log_end}")
                await asyncio.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
