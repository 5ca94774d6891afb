"""What every command shares: words and flags, exit codes, and errors without tracebacks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from nemo_gym.contract.errors import ConfigError, NemoGymError, RowError

EXIT_OK = 0
EXIT_FAILED = 1
"""The infrastructure failed, or what the command found is not as it should be."""
EXIT_USAGE = 2
"""The configuration, the command line or a row of the input is wrong."""
EXIT_MASKED = 3
"""The run is complete, and some rollouts of it ended without a verdict."""
EXIT_INTERRUPTED = 130

SETTINGS = """\
Settings are key=value words in Hydra's grammar: key=value changes a key, +key=value adds one, ++key=value does either,
~key removes one; nested keys are written a.b.c. Groups choose files: agent=, environment=, sandbox=, model=, run=.
topology= is one of none (A), env_sandboxed (B), agent_in_env (C), whole_interaction (D).
NeMo Gym's "+config_paths=[a.yaml,b.yaml]" works as well; env.yaml in the working directory is read last but one.
Secrets belong in env.yaml or the environment (policy_api_key: ${oc.env:MY_KEY}), not on the command line.

Exit codes: 0 all is well; 1 a server or the command itself failed; 2 wrong configuration, usage or rows; 3
the run is complete, with rollouts that have no verdict; 130 interrupted.
"""


def parser(name: str, description: str, *, words: str = "key=value") -> argparse.ArgumentParser:
    """A parser with the shared help and any number of settings."""
    result = argparse.ArgumentParser(
        prog=name, description=description, epilog=SETTINGS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("settings", nargs="*", metavar=words, help="settings, see below")
    return result


def plain_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser of a command that takes files and flags, and no settings of a composition."""
    return argparse.ArgumentParser(prog=name, description=description)


def run(name: str, body: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command's body and exit with its code. Expected errors are one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = body(words)
        sys.stdout.flush()
    except NemoGymError as error:
        complain(name, without_secrets(error.message, words))
        code = EXIT_USAGE if isinstance(error, ConfigError | RowError) else EXIT_FAILED
    except KeyboardInterrupt:
        complain(name, "interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (``ng_status | head``): not an error, and no more output is possible.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_OK
    sys.exit(code)


def complain(name: str, message: str) -> None:
    print(f"{name}: error: {message}", file=sys.stderr)


def without_secrets(text: str, words: Iterable[str]) -> str:
    """``text`` without the values of secret settings among ``words``."""
    from nemo_gym._util.secrets import is_secret_name, scrub

    secrets = []
    for word in words:
        key, _, value = word.partition("=")
        if len(value) >= 4 and is_secret_name(key.lstrip("+~").split(".")[-1]):
            secrets.append(value.strip("'\""))
    return scrub(text, secrets)


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, each column as wide as its widest cell."""
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
