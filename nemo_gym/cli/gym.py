"""``ng`` and ``gym``: one command over the others, with NeMo Gym's subcommands and flags.

`COMMANDS` maps subcommands to this suite's commands, `FLAGS` maps flags to settings. Settings (``key=value``) and
flags may be mixed. NeMo Gym's older names (``ng_test``, ``ng_dump_config``, …) are in `OLD_NAMES`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nemo_gym._util.suggest import nearest
from nemo_gym.cli import command
from nemo_gym.contract.errors import ConfigError

NAME = "ng"


@dataclass(frozen=True)
class Command:
    """One subcommand: the function that runs it, or what to do instead."""

    what: str
    runs: str = ""
    """``module:function`` below `nemo_gym.cli`."""
    adds: tuple[str, ...] = ()
    """Arguments that are put before the user's."""
    plain: bool = False
    """Whether its arguments are passed on unchanged, because it parses its own flags."""
    instead: str = ""
    """What to do instead of a subcommand that does not exist here."""


COMMANDS: Final = {
    "eval run": Command("start servers, run rows, write results", "run:evaluate_command"),
    "eval prepare": Command("make what an environment needs: images, data", "prepare:prepare"),
    "eval reverify": Command("grade stored rollouts again, and compare", "reverify:reverify_command"),
    "eval profile": Command("metrics of each task of a result file", "profile:profile", plain=True),
    "eval aggregate": Command("metrics over several result files", "profile:aggregate", plain=True),
    "eval export": Command("write trajectories for a trainer", "profile:export"),
    "eval compare": Command("two runs task by task: name both results", "show:show", plain=True),
    "eval submit": Command("a job on a cluster", instead="start `ng eval run` from the cluster's own scheduler"),
    "eval health-check": Command("check result files", instead="`ng env validate` checks a run's rows"),
    "env init": Command("write a new environment, which runs at once", "plugins:init_environment", plain=True),
    "env start": Command("start servers and keep them", "run:start_command"),
    "env test": Command("run a plugin's own tests", "plugins:run_tests", plain=True),
    "env validate": Command("compose and check, start nothing", "validate:validate"),
    "env resolve": Command("print the whole configuration", "validate:validate", ("--dump",)),
    "env status": Command("list what runs", "collect_rollouts:status"),
    "env prefetch": Command("make what an environment needs", "prepare:prepare"),
    "env packages": Command("packages of a server", instead="`pip list` in its environment"),
    "env publish": Command("share an environment", instead="publish its folder as a repository"),
    "env schema": Command("the schema of rows", instead="`task_data.py` of the environment's folder"),
    "agent init": Command("write a new agent, which runs at once", "plugins:init_agent", plain=True),
    "dataset collate": Command("join data sets", instead="rows are JSON lines: `cat a.jsonl b.jsonl`"),
    "dataset render": Command("rows with the prompts of a template", "profile:render", plain=True),
    "dataset migrate": Command("rows of an old form", instead="old and new forms are read as they are"),
    "dataset download": Command("fetch rows by name, pinned", "dataset:download", plain=True),
    "dataset upload": Command("share rows", instead="`huggingface-cli upload`"),
    "dataset rm": Command("remove rows from a registry", instead="`huggingface-cli repo` or the registry's own page"),
    "view": Command("runs in a browser", "view:view", plain=True),
    "show": Command("a run, or one rollout, in the terminal", "show:show", plain=True),
    "why": Command("why rollouts failed, with evidence", "show:why", plain=True),
    "logs": Command("all servers' log lines of one rollout", "show:logs", plain=True),
    "report": Command("a run as one file for a colleague", "profile:write_report", plain=True),
    "serve": Command("rollouts as jobs over HTTP", "run:serve_command"),
    "jobs": Command("submit, watch and cancel jobs", "jobs:jobs_command", plain=True),
    "list": Command("what exists: agents, environments, sandboxes, models", "plugins:list_parts", plain=True),
    "search": Command("what exists and has a word", "plugins:search", plain=True),
    "dev test": Command("the suite's own tests", instead="`make test` in a checkout"),
}

OLD_NAMES: Final = {
    "ng_test": "env test",
    "ng_test_all": "env test --all",
    "ng_dump_config": "env resolve",
    "ng_init_resources_server": "env init",
    "ng_materialize_prompts": "dataset render",
    "ng_reward_profile": "eval profile",
    "ng_aggregate_rollouts": "eval aggregate",
    "ng_e2e_collect_rollouts": "eval run",
    "ng_download_dataset_from_hf": "dataset download",
    "ng_prepare_benchmark": "eval prepare",
    "ng_list_benchmarks": "list",
    "ng_help": "",
    "ng_version": "--version",
}


@dataclass(frozen=True)
class Flag:
    """``--flag value`` (or ``--flag`` alone) as a setting."""

    names: tuple[str, ...]
    key: str
    what: str
    value: str | None = None
    """The setting's value, for a flag that takes no argument."""


FLAGS: Final = (
    Flag(("--agent", "-a"), "agent", "the agent"),
    Flag(("--environment",), "environment", "the environment"),
    Flag(("--resources-server",), "environment", "the same, NeMo Gym's word"),
    Flag(("--benchmark",), "benchmark", "benchmarks/NAME/config.yaml of NeMo Gym, and its rows"),
    Flag(("--sandbox",), "sandbox", "where boxes are made"),
    Flag(("--config", "-c"), "config_paths", "a configuration file; may be repeated"),
    Flag(("--model-type",), "model", "the model server's kind: gateway, openai, vllm, …"),
    Flag(("--model", "-m"), "policy_model_name", "the model's name at its endpoint"),
    Flag(("--model-url",), "policy_base_url", "the endpoint, ending in /v1"),
    Flag(("--model-api-key",), "policy_api_key", "its key; better in env.yaml"),
    Flag(("--input", "-i"), "input", "rows, a .jsonl file"),
    Flag(("--dataset",), "dataset", "rows by name: owner/name[@revision], fetched by eval prepare"),
    Flag(("--split",), "split", "of the data set"),
    Flag(("--prompt-config",), "prompt_config", "a template that writes the input of rows, .yaml"),
    Flag(("--output", "-o"), "output", "results, a .jsonl file"),
    Flag(("--limit",), "limit", "only so many tasks"),
    Flag(("--num-repeats",), "num_repeats", "samples for each task"),
    Flag(("--concurrency",), "concurrency", "rollouts at once"),
    Flag(("--temperature",), "temperature", "of sampling"),
    Flag(("--top-p",), "top_p", "of sampling"),
    Flag(("--max-output-tokens",), "max_output_tokens", "of one reply"),
    Flag(("--resume",), "resume", "continue the run of --output (the default)", "true"),
    Flag(("--disable-aggregation",), "disable_aggregation", "no metrics file", "true"),
    Flag(("--dry-run",), "dry_run", "check and start nothing", "true"),
)
_COMPOSING: Final = ("run:", "reverify:")
"""How `Command.runs` begins for commands that compose servers, beside those of the group ``env``."""
_OF_SERVERS: Final = ("environment", "benchmark", "model", "policy_model_name", "policy_base_url", "policy_api_key")
NO_SERVE = "--no-serve"
SEARCH_DIR = "--search-dir"
_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_BY_NAME: Final = {name: flag for flag in FLAGS for name in flag.names}


def main() -> None:
    """``ng``, ``gym``, and each of `OLD_NAMES`."""
    called = Path(sys.argv[0]).name
    command.run(called if called in OLD_NAMES else NAME, dispatch)


def dispatch(argv: Sequence[str]) -> int:
    words = [*OLD_NAMES.get(Path(sys.argv[0]).name, "").split(), *argv]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return command.EXIT_OK
    if words[0] == "--version":
        from importlib.metadata import version

        print(version("nemo-gym-suite"))
        return command.EXIT_OK
    name, arguments = _named(words)
    chosen = COMMANDS[name]
    if not chosen.runs:
        raise ConfigError(f"'{name}' ({chosen.what}) does not exist here: {chosen.instead}", key=name)
    if not chosen.plain and not {"-h", "--help"} & set(arguments):
        runs, arguments = translated(name, arguments)
    else:
        runs = chosen.runs
    module, function = runs.split(":")
    body: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"nemo_gym.cli.{module}"), function)
    return body([*chosen.adds, *arguments])


def _named(words: list[str]) -> tuple[str, list[str]]:
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in COMMANDS:
            return name, words[count:]
    group = [name for name in COMMANDS if name.split()[0] == words[0]]
    if group and (len(words) == 1 or words[1].startswith("-")):
        raise ConfigError(f"'{words[0]}' needs a subcommand: {', '.join(group)}", key=words[0])
    wrong = " ".join(words[:2])
    raise ConfigError(f"there is no command '{wrong}'{nearest(wrong, COMMANDS)}; see `{NAME} --help`", key=words[0])


def translated(name: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the function (``module:function``) that runs ``name`` with these arguments, and its settings."""
    runs = COMMANDS[name].runs
    settings: list[str] = []
    files: list[str] = []
    composing: list[str] = []  # flags that say which servers start
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        flag, equals, value = word.partition("=") if word.startswith("-") else (word, "", "")
        if flag == NO_SERVE:
            if not equals or _is_true(flag, value):
                runs = "collect_rollouts:collect_command"
        elif flag == SEARCH_DIR or flag in _BY_NAME:
            definition = _BY_NAME.get(flag)
            if definition is not None and definition.value is not None:
                told = str(_is_true(flag, value)).lower() if equals else definition.value
                settings.append(f"{definition.key}={told}")
                continue
            if not equals:
                if not remaining or (remaining[0].startswith("-") and not _NUMBER.fullmatch(remaining[0])):
                    raise ConfigError(f"{flag} needs a value", key=flag)
                value = remaining.pop(0)
            if definition is not None and definition.key in _OF_SERVERS:
                composing.append(flag)
            if definition is None:
                add_root(value)
            elif definition.key == "config_paths":
                files.append(value)
            else:
                settings.append(_setting(definition.key, value))
        elif flag.startswith("--") and name not in ("env validate", "eval reverify", "env status"):
            raise ConfigError(f"'{name}' knows no flag {flag}{nearest(flag, _BY_NAME)}", key=flag)
        else:
            settings.append(word)
    if runs.startswith(_COMPOSING) or name.startswith("env "):
        # Grading again takes the model of the run's own configuration, if it needs one.
        return runs, _composed(settings, files, needs_policy=name != "eval reverify")
    called = f"{name} {NO_SERVE}" if name == "eval run" else name
    if files or (composing and name == "eval run"):
        flag = "--config" if files else composing[0]
        raise ConfigError(f"'{called}' composes no servers, so {flag} would do nothing; leave it out", key=flag)
    return runs, [f"agent_name={word[6:]}" if word.startswith("agent=") else word for word in settings]


def _setting(key: str, text: str, value: object = None) -> str:
    """Return ``key=text``, or ``value`` (by default the text) in quotes if Hydra's grammar cannot read ``text``."""
    from nemo_gym.config.overrides import parse_overrides, word_of

    word = f"{key}={text}"
    try:
        parse_overrides([word])
    except ConfigError:
        return word_of(key, text if value is None else value)
    return word


def _is_true(flag: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"{flag}={value}: must be true or false; {flag} alone means true", key=flag)
    return value.lower() == "true"


def add_root(folder: str) -> None:
    """Look for plugins below ``folder`` first."""
    from nemo_gym.config.files import EXTRA_ROOTS_VARIABLE

    existing = os.environ.get(EXTRA_ROOTS_VARIABLE)
    os.environ[EXTRA_ROOTS_VARIABLE] = os.pathsep.join(part for part in (folder, existing) if part)


def _composed(settings: list[str], files: list[str], *, needs_policy: bool) -> list[str]:
    """Return the settings of a command that composes, with files in place of the names of NeMo Gym's plugins."""
    from nemo_gym.config.files import find_file, plugin_roots

    roots = plugin_roots()
    has_own_files = bool(files)  # they may define a model
    result: list[str] = []
    for word in settings:
        key, _, value = word.partition("=")
        asset, _, flavour = value.partition("/")  # NeMo Gym's name/flavour: another file of the same plugin
        if key == "benchmark":
            nested = f"benchmarks/{value}/config.yaml"
            is_flavour = flavour and not find_file(nested, roots)
            files.append(f"benchmarks/{value}.yaml" if is_flavour else nested)
        elif key == "environment" and not find_file(f"configs/environment/{value}.yaml", roots):
            own = f"resources_servers/{asset}/configs/{flavour or asset}.yaml"
            candidates = (f"environments/{value}/config.yaml", f"environments/{value}.yaml", own)
            plugin_file = next((path for path in candidates if find_file(path, roots)), None)
            if plugin_file is None or any(other.startswith("agent=") for other in settings):
                result.append(word)
            else:
                # The file defines the agent as well.
                files.append(plugin_file)
        elif key == "model" and not find_file(f"configs/model/{value}.yaml", roots):
            files.append(f"responses_api_models/{asset}/configs/{flavour or asset}.yaml")
        else:
            result.append(word)
    if files:
        result.append(_setting("+config_paths", f"[{','.join(files)}]", files))
    is_policy_named = any(word.startswith(("policy_base_url=", "policy_model_name=")) for word in result)
    has_model = has_own_files or any(word.startswith("model=") for word in result)
    has_model = has_model or any("responses_api_models/" in file for file in files)
    if needs_policy and is_policy_named and not has_model:
        result.append("model=gateway")
    return result


def usage() -> str:
    """The help of ``ng``."""
    lines = ["ng <command> [flags] [key=value …]", "", "commands (each has --help):"]
    lines += [f"  {name:18} {entry.what}" for name, entry in COMMANDS.items() if entry.runs]
    lines += ["", "flags of eval run, env start, env validate and env resolve, and the settings that they are:"]
    for flag in FLAGS:
        names = ", ".join(flag.names) + ("" if flag.value else " X")
        lines.append(f"  {names:24} {flag.key:20} {flag.what}")
    lines.append(f"  {NO_SERVE:24} {'':20} run against servers that run already")
    lines.append(f"  {SEARCH_DIR + ' X':24} {'':20} look for plugins below X first")
    missing = ", ".join(name for name, entry in COMMANDS.items() if not entry.runs)
    return "\n".join(
        [*lines, "", f"Commands of NeMo Gym that are not supported here (each says what to do instead): {missing}"]
    )
