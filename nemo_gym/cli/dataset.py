"""``ng dataset download`` and ``ng_prepare ENVIRONMENT dataset=NAME``: fetch rows once, pinned by commit and checksum.

The same command takes rows from a directory in ``NEMO_GYM_DATASETS`` (``<directory>/<owner>/<name>``, as a clone or
``hf download --local-dir`` leaves it) that has them, else from the hub or the mirror that ``HF_ENDPOINT`` names.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson

from nemo_gym._util.suggest import first_line, nearest
from nemo_gym.cli import command
from nemo_gym.config.datasets import DataSet, digest_of
from nemo_gym.config.files import find_plugin
from nemo_gym.config.keys import ENVIRONMENT_TYPE
from nemo_gym.contract.errors import ConfigError

DIRECTORIES = "NEMO_GYM_DATASETS"
_EXTRA = "pip install 'nemo-gym-suite[data]'"
_PATTERNS: Final = [f"*.{ending}" for ending in ("json", "jsonl", "parquet", "csv", "tsv", "txt", "arrow")]
_FETCHED_PATTERNS: Final = [*_PATTERNS, *(f"{name}.*" for name in _PATTERNS), "README.md", "*.yaml"]
"""Data files, also compressed, and files that describe the splits. No programs are fetched."""
_TIMEOUT_S = 30.0
_NEMO_GYM_SETTINGS = {"repo_id": "dataset", "output_fpath": "output", "dataset_name": "dataset"}
"""NeMo Gym's setting → this command's setting."""
_FETCHED_BY = ("split", "refresh", "sha256")
"""Settings of `fetch_rows`."""


def download(argv: Sequence[str]) -> int:
    """``ng dataset download NAME[@REVISION] [split=SPLIT] [output=ROWS.jsonl]``."""
    parser = command.parser(
        "ng dataset download", "Fetch a data set's rows from the hub, a mirror or a directory.", words="NAME"
    )
    parser.add_argument("--repo-id", "--name", dest="dataset", help="owner/name, in place of the word")
    parser.add_argument("--revision", help="a commit, tag or branch, as NAME@REVISION")
    parser.add_argument("--split", help="which split (default: the only one)")
    parser.add_argument("--environment", help="its short names and its fields' names count")
    parser.add_argument("--output", "-o", help="a copy of the rows, a .jsonl file")
    arguments = parser.parse_intermixed_args(argv)
    given = {key: value for key, value in vars(arguments).items() if key != "settings" and value is not None}
    for word in arguments.settings:
        key, equals, value = word.lstrip("+").partition("=")
        given |= {_NEMO_GYM_SETTINGS.get(key, key): value} if equals else {"dataset": word}
    name = given.pop("dataset", None)
    if not name:
        raise ConfigError("which data set? ng dataset download owner/name", key="dataset")
    if revision := given.pop("revision", None):
        name = f"{name.partition('@')[0]}@{revision}"
    environment = given.pop("environment", None)
    folder = None if environment is None else find_plugin(ENVIRONMENT_TYPE, environment)
    output = given.pop("output", None)
    if wrong := next((key for key in given if key not in _FETCHED_BY), None):
        raise ConfigError(
            f"'ng dataset download' knows no key '{wrong}'{nearest(wrong, ('output', *_FETCHED_BY))}",
            key=wrong,
        )
    rows = fetch_rows(name, given, folder)
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_bytes(rows.read_bytes())
        rows = Path(output)
    print(rows)
    return command.EXIT_OK


def fetch_rows(name: str, values: Mapping[str, Any], environment: Path | None) -> Path:
    """Return the rows' file of the data set ``name``, of ``split`` and ``sha256``; fetch it unless it is there and
    ``refresh`` is false. Raises `ConfigError`."""
    dataset = DataSet.parse(name, values.get("split"), environment)
    if pinned := values.get("sha256"):
        dataset = replace(dataset, sha256=pinned)
    if str(values.get("refresh", "false")).lower() not in ("true", "1", "yes"):
        try:
            return dataset.prepared()
        except ConfigError as error:
            if error.message != dataset.absent().message:
                raise
    local = _local_copy(dataset)
    with tempfile.TemporaryDirectory(prefix="nemo-gym-dataset-") as scratch:
        if local is not None:
            source, commit, where = local, None, str(local)
        else:
            source, commit, where = _from_hub(dataset, Path(scratch))
        split, rows = _load(dataset, source, Path(scratch))
        return _store(dataset, split, rows, {"commit": commit, "source": where})


def _local_copy(dataset: DataSet) -> Path | None:
    """Return a directory that holds the data set; the directory of a revision is named ``<name>@<revision>``."""
    for directory in filter(None, os.environ.get(DIRECTORIES, "").split(os.pathsep)):
        for name in (f"{dataset.repo}@{dataset.revision}", dataset.repo):
            path = Path(directory).expanduser() / name
            if path.is_dir():
                if name == dataset.repo and dataset.revision != "main":
                    raise ConfigError(
                        f"the directory {path} is not marked as revision {dataset.revision}; name it"
                        f" {path.name}@{dataset.revision}, or ask for '{dataset.repo}'",
                        key="dataset",
                    )
                return path.resolve()
    return None


def _from_hub(dataset: DataSet, scratch: Path) -> tuple[Path, str, str]:
    """Fetch a snapshot at one commit; check large files against the hub's digests. Return folder, commit and hub."""
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise ConfigError(f"data sets by name need huggingface_hub: {_EXTRA}", key="dataset") from None
    endpoint = constants.ENDPOINT
    try:
        info = HfApi(endpoint=endpoint).dataset_info(
            dataset.repo, revision=dataset.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
        assert info.sha is not None
        folder = Path(
            snapshot_download(
                dataset.repo,
                repo_type="dataset",
                revision=info.sha,
                endpoint=endpoint,
                allow_patterns=_FETCHED_PATTERNS,
                local_dir=scratch / "snapshot",
            )
        )
    except RevisionNotFoundError:
        raise ConfigError(
            f"data set '{dataset.repo}' has no revision '{dataset.revision}' at {endpoint}", key="dataset"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{endpoint} has no data set '{dataset.repo}', or not for you (a private one needs HF_TOKEN)",
            key="dataset",
        ) from None
    except Exception as error:
        raise ConfigError(
            f"data set '{dataset.asked}' cannot be fetched from {endpoint}: {first_line(error)}; without a network,"
            f" name a mirror with HF_ENDPOINT, or a directory that holds {dataset.repo} with {DIRECTORIES}",
            key="dataset",
        ) from error
    for sibling in info.siblings or ():
        file = folder / sibling.rfilename
        if sibling.lfs is not None and file.is_file() and digest_of(file) != sibling.lfs.sha256:
            raise ConfigError(
                f"{sibling.rfilename} of '{dataset.repo}' arrived damaged (its sha256 is not {sibling.lfs.sha256});"
                " fetch it again",
                key="dataset",
            )
    return folder, info.sha, endpoint


def _load(dataset: DataSet, source: Path, scratch: Path) -> tuple[str, Iterable[Mapping[str, Any]]]:
    """Return the split's name and its rows, as the `datasets` package reads the files."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data sets by name need the package datasets: {_EXTRA}", key="dataset") from None
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(str(source), dataset.subset, cache_dir=str(scratch / "cache"))
    except Exception as error:
        raise ConfigError(
            f"data set '{dataset.asked}' cannot be read: {first_line(error)}"
            + ("" if dataset.subset else "; one of several subsets is named owner/name:subset"),
            key="dataset",
        ) from error
    names = list(splits)
    if dataset.split is None and len(names) > 1:
        raise ConfigError(f"data set '{dataset.asked}' has {', '.join(names)}; say which with split=", key="split")
    chosen = dataset.split or names[0]
    if chosen not in splits:
        raise ConfigError(
            f"data set '{dataset.asked}' has no split '{chosen}'{nearest(chosen, names)}; it has: {', '.join(names)}",
            key="split",
        )
    return chosen, splits[chosen]


def _store(dataset: DataSet, split: str, rows: Iterable[Mapping[str, Any]], origin: Mapping[str, Any]) -> Path:
    """Write all rows or none, and the record of their origin."""
    dataset.folder.mkdir(parents=True, exist_ok=True)
    final, record = dataset.rows_file(split), dataset.record_file(split)
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    count = 0
    try:
        with temporary.open("wb") as stream:
            for row in _rename_fields(rows, dataset):
                stream.write(orjson.dumps(row, default=str) + b"\n")
                count += 1
        digest = digest_of(temporary)
        if dataset.sha256 not in (None, digest):
            raise ConfigError(
                f"data set '{dataset.asked}' has sha256 {digest}, not {dataset.sha256} as pinned", key="sha256"
            )
        data = {"dataset": dataset.repo, "subset": dataset.subset, "revision": dataset.revision, **origin}
        data |= {"split": split, "rows": count, "sha256": digest}
        _check_same_rows(record, data)
        temporary.replace(final)
        record.write_text(json.dumps(data, indent=1) + "\n")
    finally:
        temporary.unlink(missing_ok=True)
    commit = f" at commit {data['commit']}" if data["commit"] else ""
    print(f"{count} rows of {dataset.repo}{commit} from {data['source']}, sha256 {data['sha256']}", file=sys.stderr)
    return final


def _check_same_rows(record: Path, data: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the record has other rows for the same commit."""
    try:
        previous = json.loads(record.read_text())
    except (OSError, ValueError):
        return
    if data["commit"] and previous.get("commit") == data["commit"] and previous.get("sha256") != data["sha256"]:
        raise ConfigError(
            f"commit {data['commit']} of '{data['dataset']}' had rows of sha256 {previous['sha256']} and now has"
            f" {data['sha256']}; the source {data['source']} changed the rows of a commit. The first download is"
            f" recorded in {record}",
            key="dataset",
        )


def _rename_fields(rows: Iterable[Mapping[str, Any]], dataset: DataSet) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        renamed = dict(row)
        for field, source in dataset.rename.items():
            if source not in renamed:
                raise ConfigError(
                    f"row {number} of '{dataset.asked}' has no field '{source}', which '{field}' is made of; it has:"
                    f" {', '.join(renamed)}",
                    key="rename",
                )
            renamed[field] = renamed.pop(source)
        yield renamed
