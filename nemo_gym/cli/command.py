"""What every command shares: words and flags, exit codes, and errors without tracebacks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from nemo_gym import cli
from nemo_gym._util.files import discard, outlasted
from nemo_gym._util.secrets import is_secret_name, scrub, without_password
from nemo_gym._util.terminal import shown
from nemo_gym.contract.errors import ConfigError, NemoGymError, RowError, ServerError, reject_unknown_keys

if TYPE_CHECKING:
    from rich.console import Console

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
    with outlasted("stderr"):
        sys.exit(_code_of(name, body, list(sys.argv[1:] if argv is None else argv)))


def _code_of(name: str, body: Callable[[Sequence[str]], int], words: list[str]) -> int:
    try:
        cli.imports_are_done()
        code = body(words)
        sys.stdout.flush()
    except NemoGymError as error:
        complain(name, without_secrets(error.message, words))
        code = exit_code_of(error)
    except KeyboardInterrupt:
        complain(name, "interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (``ng_status | head``): not an error, and no more output is possible.
        discard(sys.stdout)
        code = EXIT_OK
    return code


@contextmanager
def outlasts_output() -> Iterator[None]:
    """Decorates a command whose results are files and whose exit code says how the work went. Unlike a command that
    only prints, it continues when nobody reads stdout any more, or the disk that holds it is full."""
    with outlasted("stdout"):
        try:
            yield
        except BrokenPipeError as error:  # not of its output; `run` would take it for that, and exit with 0
            raise ServerError(f"a connection broke: {error}") from error


def exit_code_of(error: NemoGymError) -> int:
    return EXIT_USAGE if isinstance(error, ConfigError | RowError) else EXIT_FAILED


def complain(name: str, message: str) -> None:
    print(f"{name}: error: {shown(message)}", file=sys.stderr)


def key_of(word: str) -> str:
    """The key of a setting, or the whole word if it is none."""
    return word.lstrip("+~").partition("=")[0]


def is_secret(word: str) -> bool:
    """Whether the word sets a secret."""
    return is_secret_name(key_of(word).split(".")[-1])


def without_secrets(text: str, words: Iterable[str]) -> str:
    """``text`` without the values of secret settings among ``words``, and without passwords of URLs."""
    secrets = [word.partition("=")[2] for word in words if is_secret(word)]
    return scrub(without_password(text), [value.strip("'\"") for value in secrets if len(value) >= 4])


def plugin_name(words: Sequence[str], flag: str | None) -> str | None:
    """Return the plugin that a command line names: with a flag, as a word, or as NeMo Gym's setting ``entrypoint``."""
    settings = dict(word.lstrip("+").partition("=")[::2] for word in words if "=" in word)
    return flag or next((word for word in words if "=" not in word), None) or settings.get("entrypoint")


def settings_of(words: Iterable[str], keys: Collection[str]) -> dict[str, str]:
    """Return ``key=value`` words as a mapping, for a command that composes nothing. Raises `ConfigError` for unknown
    keys."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    reject_unknown_keys(given, keys, where="the command line")
    return given


def whole_number(key: str, text: str) -> int:
    """Parse the value of ``key``. Raises `ConfigError`."""
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{key}={text} must be a whole number", key=key)
    return int(text)


def result_console() -> Console:
    """Return a console that prints text of models, boxes and datasets as text: only rich itself moves the cursor."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class TextConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(shown(segment.text), segment.style)

    # A file has no width; tables cut to 80 columns would be of little use in it.
    return TextConsole(width=None if sys.stdout.isatty() else 140)


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, each column as wide as its widest cell."""
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
