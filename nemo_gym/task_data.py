"""A plugin's schema of its rows (``TaskData`` in its ``task_data.py``), and checks of rows against it. The module's
name is NeMo Gym's."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from nemo_gym._util.lazy import module_of
from nemo_gym.config.files import plugin_roots
from nemo_gym.contract.verdict import AGENT_REF_KEY, PARAMS_KEY, ROLLOUT_INDEX_KEY, TASK_INDEX_KEY

TASK_DATA_MODULE_NAME = "task_data"
TASK_DATA_EXPORT_NAME = "TaskData"
TASK_DATA_ROW_KEY = "task_data"
LEGACY_METADATA_KEY = "verifier_metadata"
RESERVED_ROW_KEYS = frozenset({PARAMS_KEY, AGENT_REF_KEY, "task_source", TASK_INDEX_KEY, ROLLOUT_INDEX_KEY})
"""Keys of a row that belong to the run and not to its task."""
_OF_THE_TASK = ("task_id", "problem_id", "instance_id")


class TaskDataSchemaError(Exception):
    """A plugin's ``task_data.py`` cannot be used."""


def find_server_dir(server_name: str, base_folder: str = "resources_servers") -> Path | None:
    """Return the folder of a plugin, or ``None``."""
    folders = (root / base_folder / server_name for root in plugin_roots())
    return next((folder for folder in folders if folder.is_dir()), None)


def load_task_data_schema(server_dir: Path) -> TypeAdapter[Any] | None:
    """Return the schema of the plugin in ``server_dir``, or ``None`` if it has none. Raises `TaskDataSchemaError`."""
    path = Path(server_dir) / f"{TASK_DATA_MODULE_NAME}.py"
    if not path.is_file():
        return None
    name = f"_ng_task_data_{path.parent.name}"
    try:
        return TypeAdapter(getattr(module_of(path, name), TASK_DATA_EXPORT_NAME))
    except AttributeError as error:
        raise TaskDataSchemaError(f"{path} exports no '{TASK_DATA_EXPORT_NAME}'") from error
    except Exception as error:
        # A plugin's module may raise anything.
        raise TaskDataSchemaError(f"{path}: {type(error).__name__}: {error}") from error
    finally:
        sys.modules.pop(name, None)


def normalize_task_fields(row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a row's own fields, with those of ``verifier_metadata`` and ``task_data`` moved to the top level, and the
    names of fields that occur in two places with different values."""
    fields = {key: value for key, value in row.items() if key not in RESERVED_ROW_KEYS}
    conflicts = []
    for container in (LEGACY_METADATA_KEY, TASK_DATA_ROW_KEY):
        inner = fields.get(container)
        if isinstance(inner, Mapping):
            del fields[container]
            for key, value in inner.items():
                if key in fields and fields[key] != value:
                    conflicts.append(str(key))
                fields.setdefault(key, value)
    return fields, conflicts


@dataclass
class TaskDataValidationReport:
    """The problems in the rows of one file."""

    server_name: str
    dataset_fpath: str
    rows: int = 0
    error_rows: int = 0
    errors: list[str] = field(default_factory=list)
    """The first `MAX_RECORDED_ERRORS` errors."""
    unknown_keys: Counter[str] = field(default_factory=Counter)
    conflicting_keys: Counter[str] = field(default_factory=Counter)
    misplaced_keys: Counter[str] = field(default_factory=Counter)

    MAX_RECORDED_ERRORS: ClassVar[int] = 5

    @property
    def clean(self) -> bool:
        return not (self.error_rows or self.unknown_keys or self.conflicting_keys or self.misplaced_keys)

    def summary(self) -> str:
        parts = [f"{self.dataset_fpath}: {self.error_rows} of {self.rows} rows do not fit {self.server_name}'s schema"]
        for name in ("unknown_keys", "conflicting_keys", "misplaced_keys"):
            if counts := getattr(self, name):
                listed = ", ".join(f"{key} ({count})" for key, count in sorted(counts.items()))
                parts.append(f"{name.replace('_', ' ')}: {listed}")
        return "; ".join([*parts, *self.errors])


class TaskDataValidator:
    """Checks rows one by one; ``report`` holds the result."""

    def __init__(self, server_name: str, adapter: TypeAdapter[Any], dataset_fpath: str) -> None:
        self.report = TaskDataValidationReport(server_name, dataset_fpath)
        self._adapter = adapter
        schema = _model_of(adapter)
        self._known_fields = frozenset(schema.model_fields) if schema is not None else None
        self._legacy = legacy_metadata_fields(adapter)

    def validate_row(self, row_index: int, row: dict[str, Any]) -> None:
        report = self.report
        report.rows += 1
        fields, conflicts = normalize_task_fields(row)
        report.conflicting_keys.update(conflicts)
        if self._known_fields is not None:
            report.unknown_keys.update(key for key in fields if key not in self._known_fields)
        inner = row.get(LEGACY_METADATA_KEY)
        nested = inner if isinstance(inner, Mapping) else {}
        if TASK_DATA_ROW_KEY not in row:
            report.misplaced_keys.update(key for key in self._legacy if key in row and key not in nested)
        try:
            self._adapter.validate_python(fields)
        except ValidationError as error:
            report.error_rows += 1
            if len(report.errors) < report.MAX_RECORDED_ERRORS:
                first = error.errors(include_input=False, include_url=False)[0]
                where = ".".join(map(str, first["loc"])) or "the row"
                report.errors.append(f"row {row_index}: {where}: {first['msg']}")


def legacy_metadata_fields(adapter: TypeAdapter[Any]) -> frozenset[str]:
    """Return the fields whose schema has ``legacy_location: verifier_metadata``: they are still read from there."""
    schema = _model_of(adapter)
    if schema is None:
        return frozenset()
    return frozenset(
        name
        for name, info in schema.model_fields.items()
        if isinstance(info.json_schema_extra, Mapping)
        and info.json_schema_extra.get("legacy_location") == LEGACY_METADATA_KEY
    )


def _model_of(adapter: TypeAdapter[Any]) -> type[BaseModel] | None:
    schema = getattr(adapter, "_type", None)
    return schema if isinstance(schema, type) and issubclass(schema, BaseModel) else None


def validate_jsonl_rows(
    server_name: str, adapter: TypeAdapter[Any], dataset_fpath: str, lines: Iterable[str]
) -> TaskDataValidationReport:
    """Return the report on all lines of a file."""
    validator = TaskDataValidator(server_name, adapter, dataset_fpath)
    for index, line in enumerate(lines):
        if line.strip():
            validator.validate_row(index, json.loads(line))
    return validator.report


def materialize_task(
    row: Mapping[str, JsonValue], *, taskset: str, task_index: int | None = None
) -> dict[str, JsonValue]:
    """Return a row as ``{task_id: {taskset, task_id}, task_input: {responses_create_params, task_data}}``. The id of a
    row without its own name is the run's task index, or else ``task_index``."""
    task_id = next((row[key] for key in _OF_THE_TASK if isinstance(row.get(key), str | int)), None)
    if task_id is None:
        task_id = row.get(TASK_INDEX_KEY, task_index)
    if task_id is None:
        raise ValueError(f"the row has neither {', '.join(_OF_THE_TASK)} nor a number; pass task_index")
    fields = {key: value for key, value in row.items() if key not in RESERVED_ROW_KEYS and key != TASK_DATA_ROW_KEY}
    inner = row.get(TASK_DATA_ROW_KEY)
    if isinstance(inner, Mapping):
        fields = {**fields, **inner}
    task_input: dict[str, JsonValue] = {PARAMS_KEY: row.get(PARAMS_KEY), "task_data": fields}
    return {"task_id": {"taskset": taskset, "task_id": str(task_id)}, "task_input": task_input}
