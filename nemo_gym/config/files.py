"""Reading YAML files and what they include."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nemo_gym._util.suggest import first_line, nearest
from nemo_gym.config.keys import CONFIG_PATHS
from nemo_gym.config.layers import Layer
from nemo_gym.config.roots import find_file
from nemo_gym.contract.errors import ConfigError


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one file's mapping without interpolation. Duplicate keys and bad YAML raise `ConfigError` with the line."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        loaded = OmegaConf.load(path)
    except RecursionError as error:
        raise ConfigError(
            f"{path}: is nested too deeply, or one of its anchors holds itself", file=str(path)
        ) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: {error.problem or 'not valid YAML'}", file=str(path)) from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}", file=str(path)) from error
    values = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(loaded, DictConfig) or _is_text(path, values):
        raise ConfigError(
            f"{path}: the file must hold a mapping of keys to values ('key: value'), not a list, a text or a number",
            file=str(path),
        )
    if values is None:
        return {}
    assert isinstance(values, dict)
    # Deeper keys may be anything YAML allows (logit biases by token id): they are the plugin's business.
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(
                f"{path}: key {key!r} is a {type(key).__name__}; write it in quotes", file=str(path), key=str(key)
            )
    return values  # type: ignore[return-value]


def _is_text(path: Path, values: Any) -> bool:
    """Whether a file holds one text, as it does when the colon after its only key is forgotten. OmegaConf reads it as
    a key without a value; the text may be a secret."""
    import yaml

    if not isinstance(values, dict) or [*values.values()] != [None]:
        return False
    return isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), str)


def include_paths(value: Any, source: str) -> list[str]:
    """The value of ``config_paths`` as a list of paths, with environment variables resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(
            f"{source}: {CONFIG_PATHS} must be a list of file paths, got {value!r};"
            f' write "+{CONFIG_PATHS}=[first.yaml,second.yaml]"',
            key=CONFIG_PATHS,
        )
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(value), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {CONFIG_PATHS}: {first_line(error)}", key=CONFIG_PATHS) from error
    assert isinstance(resolved, list)
    return [str(item) for item in resolved]


def load_files(paths: Iterable[str], roots: Sequence[Path], source: str) -> list[Layer]:
    """Return the layers of the files and everything they include, lowest precedence first: includes come before the
    file that includes them, in their order. A file that is included twice is loaded once, at its first place."""
    layers: list[Layer] = []
    done: set[Path] = set()
    for path in paths:
        _load(path, roots, source, None, (), done, layers)
    return layers


def _load(
    name: str,
    roots: Sequence[Path],
    source: str,
    beside: Path | None,
    chain: tuple[Path, ...],
    done: set[Path],
    layers: list[Layer],
) -> None:
    path = find_file(name, roots, beside)
    if path is None:
        raise ConfigError(_not_found(name, roots, source), key=CONFIG_PATHS, file=name)
    path = path.resolve()
    if path in chain:
        cycle = " → ".join(str(item) for item in (*chain[chain.index(path) :], path))
        raise ConfigError(
            f"{CONFIG_PATHS} include each other in a circle: {cycle}; remove one of them", file=str(path)
        )
    if path in done:
        return
    values = read_yaml(path)
    for included in include_paths(values.pop(CONFIG_PATHS, None), str(path)):
        _load(included, roots, str(path), path.parent, (*chain, path), done, layers)
    done.add(path)
    layers.append(Layer(str(path), values))


def _not_found(name: str, roots: Sequence[Path], source: str) -> str:
    folders = [root / Path(name).parent for root in roots]
    siblings = [entry.name for folder in folders if folder.is_dir() for entry in folder.glob("*.y*ml")]
    where = ", ".join(str(root) for root in roots)
    return f"{source}: no file '{name}'{nearest(Path(name).name, siblings)}; searched {where}"
