"""Runs from a program: ``from nemo_gym import run`` for notebooks and scripts, ``run_async`` for trainers.

The servers run in a separate process, as with `ng env start`. The rollouts run in this process, through the pipeline
of ``ng_run`` (`run_collection`), and write the same files. NeMo Gym's `RunHelper` only starts and stops the servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson
import structlog
from rich.console import Console

from nemo_gym._util.suggest import nearest
from nemo_gym._util.tasks import LoopThread
from nemo_gym.cli.collect_rollouts import stack_telemetry
from nemo_gym.cli.command import key_of, result_console
from nemo_gym.cli.run import check_rollout_run
from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition
from nemo_gym.config.files import read_yaml
from nemo_gym.config.overrides import word_of
from nemo_gym.config.pipeline import PipelineConfig
from nemo_gym.config.run import RUN_KEYS, RolloutRunConfig
from nemo_gym.config.run_defaults import complete_run, default_output
from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.contract.verdict import ROLLOUT_INDEX_KEY, TASK_INDEX_KEY
from nemo_gym.http.client import close_global_aiohttp_client
from nemo_gym.rollouts.collection import CollectionResult, RunOutlook, run_collection, show_finished
from nemo_gym.rollouts.results import RunFiles
from nemo_gym.stack.background import BackgroundStack
from nemo_gym.stack.endpoints import StackEntry
from nemo_gym.stack.stack import CONFIG_FILE, pipeline_client

if TYPE_CHECKING:
    import pandas

_log = structlog.get_logger(__name__)

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A JSONL file, or rows in memory."""
FRAME_COLUMNS = [
    *("task_id", "task", "sample", "agent", "reward", "valid", "outcome", "findings", "turns"),
    *("input_tokens", "output_tokens", "seconds", "attempts", "reason"),
]
"""The columns of `RunResult.data_frame`."""
_KEYS_OF_ONE_RUN = {*RUN_KEYS, "dataset", "split", "run", "config_paths"} - {"run_dir"}
"""Settings that a run on running servers may have. Run groups and files are among them: they can hold run keys."""
_DROPPED_KEYS = frozenset(
    {
        "head_server",
        "ray_head_node_address",
        "global_aiohttp_connector_limit",
        "global_aiohttp_connector_limit_per_host",
        "config_paths",
    }
)
"""Keys of NeMo RL that are dropped: there is no head server and no Ray here, and connections are not limited."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run. Its files remain; ``collection.files`` names them."""

    collection: CollectionResult

    @property
    def output(self) -> Path:
        return self.collection.files.output

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The result row of every rollout with a verdict, sorted by task and sample."""
        return _read(self.collection.files.output)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The row of every rollout without a verdict: its reward is ``None``, ``failure_kind`` says why."""
        return _read(self.collection.files.failures)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Aggregate metrics, an entry for each agent."""
        return self.collection.aggregates

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of the rollouts with a verdict; ``None`` if there are none."""
        rewards = [each.reward for each in self.collection.summaries if each.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def data_frame(self) -> pandas.DataFrame:
        """Return one line for each rollout, also without a verdict (then its reward is missing). Needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "data_frame needs pandas, which is not installed: pip install 'nemo-gym-suite[data]'; `rows` holds the"
                " same as plain data",
                key="data_frame",
            ) from None
        usage = {_place(row): (row.get("response") or {}).get("usage") or {} for row in (*self.rows, *self.failures)}
        lines = [
            {
                "task_id": each.task_id,
                "task": each.task_index,
                "sample": each.sample_index,
                "agent": each.agent,
                "reward": each.reward,
                "valid": each.reward is not None,
                "outcome": each.outcome,
                "findings": each.findings,
                "turns": each.turns,
                "input_tokens": usage.get((each.task_index, each.sample_index), {}).get("input_tokens"),
                "output_tokens": usage.get((each.task_index, each.sample_index), {}).get("output_tokens"),
                "seconds": each.seconds,
                "attempts": each.attempts,
                "reason": each.reason,
            }
            for each in sorted(self.collection.summaries, key=lambda item: (item.task_index, item.sample_index))
        ]
        return pandas.DataFrame(lines, columns=FRAME_COLUMNS)


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return row[TASK_INDEX_KEY], row[ROLLOUT_INDEX_KEY]


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return sorted((orjson.loads(line) for line in file.read_bytes().splitlines() if line), key=_place)


class AsyncStack:
    """Running servers and the settings that composed them. ``run`` may be called repeatedly. Made by `start_async`."""

    def __init__(self, settings: Sequence[str], stack: StackEntry, resources: AsyncExitStack) -> None:
        """``resources`` is closed with this stack."""
        self._settings = list(settings)
        self._stack = stack
        self._resources = resources

    async def run(self, input: Rows | None = None, *settings: str, show: bool = False, **keys: Any) -> RunResult:
        """Run ``input`` (default: the environment's own rows) on these servers; ``keys`` are run keys. Raises
        `ConfigError` for other keys, unless they are set as they were at the start."""
        given = _settings_of(settings, keys)
        for word in given:
            if (key := key_of(word)).partition(".")[0] not in _KEYS_OF_ONE_RUN and word not in self._settings:
                raise ConfigError(
                    f"{key} is no setting of a run{nearest(key, _KEYS_OF_ONE_RUN)}; the servers already run, so give"
                    " theirs to start or start_async",
                    key=key,
                )
        words = [*self._settings, *given]
        config, outlook = await asyncio.to_thread(_plan, words, input)
        try:
            return await self._collect(config, outlook, show)
        finally:
            outlook.inputs.close()

    async def _collect(self, config: RolloutRunConfig, outlook: RunOutlook, show: bool) -> RunResult:
        try:
            collected = await run_collection(
                pipeline_client(self._stack),
                config,
                console=result_console() if show else None,
                configuration=Path(self._stack.run_dir, CONFIG_FILE),
                inputs=outlook.inputs,
            )
        finally:
            await close_global_aiohttp_client()
        return RunResult(collected)

    async def aclose(self) -> None:
        """Stop the servers; idempotent."""
        await self._resources.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Stack:
    """`AsyncStack` for programs without an event loop, and for notebooks, whose loop already runs. Made by `start`."""

    def __init__(self, loop: LoopThread, stack: AsyncStack) -> None:
        self._loop = loop
        self._stack = stack

    def run(self, input: Rows | None = None, *settings: str, show: bool = False, **keys: Any) -> RunResult:
        if self._loop.loop.is_closed():
            raise ServerError("the servers of this stack were stopped; start others with nemo_gym.start")
        return self._loop.run(self._stack.run(input, *settings, show=show, **keys))

    def close(self) -> None:
        """Stop the servers; idempotent."""
        if not self._loop.loop.is_closed():
            self._loop.run(self._stack.aclose())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def start_async(*settings: str, **keys: Any) -> AsyncStack:
    """Start the servers of a composition and wait until they are ready. Raises `ConfigError`, `ServerError`."""
    words = _settings_of(settings, keys)
    background = await asyncio.to_thread(_background, words)
    async with AsyncExitStack() as resources:
        # Before the start, whose thread goes on if this is cancelled: stopping the servers ends it.
        resources.push_async_callback(asyncio.to_thread, background.stop)
        stack = await asyncio.to_thread(background.start)
        await resources.enter_async_context(stack_telemetry(stack, _log.info))
        return AsyncStack(words, stack, resources.pop_all())


def start(*settings: str, **keys: Any) -> Stack:
    """Like `start_async`, but with an event loop of its own."""
    loop = LoopThread("nemo-gym-stack")
    try:
        return Stack(loop, loop.run(start_async(*settings, **keys)))
    except BaseException:
        loop.close()
        raise


async def run_async(*settings: str, input: Rows | None = None, show: bool = False, **keys: Any) -> RunResult:
    """Compose, start servers, run rollouts, stop the servers.

    Args:
        settings: arguments as on ng_run's command line (``"mcqa.resources_servers.mcqa.grading_mode=strict"``).
        input: a JSONL file or rows; by default the rows of ``dataset``, else the environment's own.
        show: print progress and the tables that ng_run prints.
        keys: settings as ``agent="simple_agent", environment="mcqa", num_repeats=4``. ``output`` defaults to
            ``results/<time>/rollouts.jsonl``; if the given file holds the same run, that run is continued.

    Raises:
        ConfigError: the composition, a key or the input is wrong; no server was started.
        RowError: rows cannot be used.
        ServerError: the servers do not come up.
    """
    words = _settings_of(settings, keys)
    config, outlook = await asyncio.to_thread(_plan, words, input)
    try:
        if outlook.finished:
            assert outlook.recorded is not None
            console = result_console() if show else Console(quiet=True)
            return RunResult(await show_finished(config, outlook.recorded, console))
        async with await start_async(*words) as stack:
            return await stack._collect(config, outlook, show)
    finally:
        outlook.inputs.close()


def run(*settings: str, input: Rows | None = None, show: bool = False, **keys: Any) -> RunResult:
    """Like `run_async`, but with an event loop of its own: for scripts, and for notebooks, whose loop already runs."""
    loop = LoopThread("nemo-gym-run")
    try:
        return loop.run(run_async(*settings, input=input, show=show, **keys))
    finally:
        loop.close()


def _settings_of(settings: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    return [*settings, *(word_of(key, value) for key, value in keys.items())]


def _background(words: Sequence[str]) -> BackgroundStack:
    """Return the servers that ``words`` compose, not started; leave out the settings of the run."""
    of_the_run = {*RUN_KEYS, "dataset", "split"} - {*PipelineConfig.spellings(), "agent", "run_id", "run_dir"}
    return BackgroundStack([word for word in words if key_of(word) not in of_the_run])


def _plan(words: Sequence[str], rows: Rows | None) -> tuple[RolloutRunConfig, RunOutlook]:
    """Compose and check everything that can be checked before any server starts."""
    composition = compose(words)
    written: Path | None = None
    if rows is not None:
        given = composition.run_values()
        if composition.has_run or "dataset" in composition.values:
            raise ConfigError("input is given twice: as an argument and among the settings", key="input")
        if not isinstance(rows, str | Path):
            output = Path(given.get("output") or given.get("output_jsonl_fpath") or default_output())
            composition.values["output"] = str(output)
            file = output.with_name(f"{output.stem}_input.jsonl")
            written = None if file.exists() else file
            files = RunFiles(output, Path(given["store"]) if given.get("store") else None)
            refused_before = files.lock.exists() and not files.store.exists()
            rows = _write_input(rows, output, file, replace=refused_before or bool(given.get("overwrite")))
        composition.values["input"] = str(rows)
    try:
        return _checked(composition)
    except BaseException:
        if written is not None:
            written.unlink(missing_ok=True)
        raise


def _checked(composition: Composition) -> tuple[RolloutRunConfig, RunOutlook]:
    complete_run(composition, wanted=True)
    if not composition.has_run:
        raise ConfigError(
            "there are no rows: the environment has none of its own (data/example.jsonl); give input= or dataset=",
            key="input",
        )
    check_everything(composition)
    return check_rollout_run(composition, keep=True)


def _write_input(rows: Iterable[Mapping[str, Any]], output: Path, file: Path, *, replace: bool) -> Path:
    """Write rows from memory to ``file`` beside the results, which refer to it."""
    if not isinstance(rows, Iterable):
        raise ConfigError(
            f"input must be the path of a JSONL file, or rows: an iterable of dicts; got {type(rows).__name__}",
            key="input",
        )
    try:
        content = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    except TypeError as error:
        raise ConfigError(f"input: a row is not JSON ({error})", key="input") from error
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not replace and file.exists() and file.read_bytes() != content:
            raise ConfigError(
                f"output '{output}': rows from memory go to {file} beside it, which holds other rows: choose another"
                " 'output', or discard that file and a run at the output with overwrite=true",
                key="output",
            )
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"output '{output}': rows from memory go to {file} beside it, which cannot be written ({error.strerror})",
            key="output",
        ) from error
    return file


@dataclass(frozen=True, slots=True)
class GlobalConfigDictParserConfig:
    """Where a run helper's configuration comes from."""

    dotenv_path: Path | None = None
    """A YAML file with more keys (``env.yaml``); ``initial_global_config_dict`` takes precedence over it."""
    initial_global_config_dict: Mapping[str, Any] | None = None
    skip_load_from_cli: bool = False
    """Accepted; the program's own command line is never read."""
    skip_load_from_dotenv: bool = False


class RunHelper:
    """Starts the servers in a separate process. `RolloutCollectionHelper` finds them."""

    def __init__(self) -> None:
        self._stack: BackgroundStack | None = None

    def start(self, global_config_dict_parser_config: GlobalConfigDictParserConfig) -> StackEntry:
        """Start everything and wait until it is ready. Raises `ConfigError`, `ServerError`."""
        from omegaconf import OmegaConf

        if self._stack is not None:
            raise ConfigError("this run helper has started its servers already; shut it down first")
        given = global_config_dict_parser_config
        initial: Any = given.initial_global_config_dict or {}
        # Interpolations stay unresolved: some refer to keys of the files, and the policy's URL is still a list here.
        plain: Any = OmegaConf.to_container(initial) if OmegaConf.is_config(initial) else initial
        values = dict(plain)
        paths = [str(path) for path in values.get("config_paths") or ()]
        if given.dotenv_path is not None and given.dotenv_path.is_file() and not given.skip_load_from_dotenv:
            values = {**read_yaml(given.dotenv_path), **values}
        values = {name: value for name, value in values.items() if name not in _DROPPED_KEYS}
        urls = values.get("policy_base_url")
        if isinstance(urls, list) and len(urls) == 1:
            values["policy_base_url"] = urls[0]
        self._stack = BackgroundStack(values=values, config_paths=paths)
        try:
            return self._stack.start()
        except BaseException:
            self._stack = None
            raise

    def poll(self) -> None:
        """Raise `ServerError` if the servers do not run. NeMo RL calls this to check the health of its environment."""
        if self._stack is None:
            raise ServerError("the servers are not running; start them first")
        self._stack.check()

    def shutdown(self) -> None:
        """Stop the servers; idempotent."""
        if self._stack is not None:
            self._stack.stop()
            self._stack = None
