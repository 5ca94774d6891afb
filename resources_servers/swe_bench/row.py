"""A validated SWE-bench row, and the image that belongs to it.

Datasets write the grader's fields in different ways; this module normalizes them. Images are named after their row's
content, so a changed row does not use a stale image.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from nemo_gym.contract.errors import RowError, SandboxImageMissingError
from nemo_gym.sandbox.base import SandboxProvider, SupportsSnapshot, require

REQUIRED_FIELDS = (
    "instance_id",
    "repo",
    "base_commit",
    "test_patch",
    "problem_statement",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
HARNESS_FIELDS = ("eval_script", "log_parser", "eval_type")
"""The fields that SWE-bench 5 rows have and classic rows lack."""
_TEXTS = ("instance_id", "repo", "base_commit", "problem_statement", "test_patch", "eval_script", "log_parser")


@dataclass(frozen=True)
class SweBenchRow:
    """One instance of SWE-bench (Verified, Lite, full or Multilingual), as published with harness 5 and later."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    """The gold patch; private."""
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    eval_script: str
    log_parser: str
    eval_type: Literal["pass_and_fail", "fail_only"]
    version: str = ""
    image: str = ""
    """The name of the official Docker image; empty if the row has none."""

    @property
    def gold(self) -> bytes:
        """The gold patch as git reads it."""
        return self.patch.encode("utf-8", "surrogateescape")

    @property
    def test_diff(self) -> bytes:
        """The test patch as git reads it."""
        return self.test_patch.encode("utf-8", "surrogateescape")

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any], *, path: str | None = None, line: int | None = None) -> SweBenchRow:
        """Validate a dataset row.

        Raises:
            RowError: a field is missing or has a wrong type. The message names the instance, the field and the fix.
        """
        where: dict[str, Any] = {"path": path, "line": line}
        name = row.get("instance_id", "without instance_id")
        missing = [field for field in REQUIRED_FIELDS if row.get(field) is None]
        if missing:
            raise RowError(f"SWE-bench row {name}: missing {', '.join(missing)}", **where)
        classic = [field for field in HARNESS_FIELDS if not row.get(field)]
        if classic:
            raise RowError(
                f"SWE-bench row {name}: missing {', '.join(classic)}; this is a classic row, take the dataset's"
                " revision for SWE-bench 5 or later, whose rows carry the evaluation script and parser",
                **where,
            )
        if row["eval_type"] not in ("pass_and_fail", "fail_only"):
            raise RowError(
                f"SWE-bench row {name}: eval_type is {row['eval_type']!r}, not pass_and_fail or fail_only", **where
            )
        if kinds := _assets_of_tests(row):
            raise RowError(
                f"SWE-bench row {name}: image_assets.{kinds[0]} has files that the tests need, which are not put in"
                " place here; leave the row out",
                **where,
            )
        return cls(
            **{name: _text(row, name, where) for name in _TEXTS},
            patch=row.get("patch") or "",
            fail_to_pass=_test_ids(row, "FAIL_TO_PASS", where),
            pass_to_pass=_test_ids(row, "PASS_TO_PASS", where),
            eval_type=row["eval_type"],
            version=str(row.get("version") or ""),
            image=str(row.get("image") or ""),
        )


def _assets_of_tests(row: Mapping[str, Any]) -> list[str]:
    """Return which parts of a Multimodal row's ``image_assets`` (an object, or its JSON) hold files for its tests."""
    assets = row.get("image_assets")
    if isinstance(assets, str):
        try:
            assets = json.loads(assets)
        except ValueError:
            assets = None
    return [kind for kind in ("test_patch", "patch") if isinstance(assets, Mapping) and assets.get(kind)]


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number, row)`` for each row of a JSONL file. Blank lines are skipped.

    Raises:
        RowError: the file cannot be read, or a run would refuse a line as it is. The error names path and line.
    """
    from nemo_gym.rollouts.rows import read_row

    try:
        lines = path.open("rb")
    except OSError as error:
        raise RowError(f"cannot read rows from {path}: {error.strerror}", path=str(path)) from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, read_row(line, path, number)


def _text(row: Mapping[str, Any], field: str, where: Mapping[str, Any]) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise RowError(
            f"SWE-bench row {row.get('instance_id')}: {field} must be text, not {type(value).__name__}", **where
        )
    return value


def _test_ids(row: Mapping[str, Any], field: str, where: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the test ids. Depending on the dataset they are a list, or a list in a JSON string."""
    value = row[field]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(
            f"SWE-bench row {row.get('instance_id')}: {field} must be a list of test ids, or one as a JSON string",
            **where,
        )
    return tuple(value)


PREFIX = "ng-swe-bench"
CONTENT_LABEL = "nemo_gym.swe_bench.content"
"""The digest of everything that a prepared image was built from. An image with another digest is out of date."""
INSTANCE_LABEL = "nemo_gym.swe_bench.instance"
ENV_LABEL = "nemo_gym.swe_bench.env"
"""Environment variables (JSON) that processes in boxes of the image need, in addition to the image's own."""

TESTBED = "/testbed"
"""The path of the repository in every image, official or prepared."""

_UNSAFE = re.compile(r"[^a-z0-9._-]+")
_SEPARATORS = re.compile(r"([._-])[._-]*")
_MAX_SLUG = 80


def _field(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise RowError(f"row {row.get('instance_id', '?')!r}: field '{name}' must be a non-empty string", field=name)
    return value


def content_digest(parts: object) -> str:
    """Return the SHA-256 (hex) of plain data. It is the same on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def image_slug(text: str) -> str:
    """Return ``text`` as part of an image name, in lower case and with only characters that every engine accepts."""
    slug = _SEPARATORS.sub(r"\1", _UNSAFE.sub("-", text.lower())).lstrip("._-")
    return slug[:_MAX_SLUG].rstrip("._-") or "x"


def prepared_image(row: Mapping[str, Any]) -> str:
    """Return the name of the image that ``ng_prepare swe_bench`` makes for this row.

    Two rows share an image only if instance, repository and base commit are the same. The other inputs of the image
    (packages, runtime, provider base) are in its `CONTENT_LABEL`, not in its name, because a run does not know them.

    Raises:
        RowError: the row lacks ``instance_id``, ``repo`` or ``base_commit``.
    """
    identity = {name: _field(row, name) for name in ("instance_id", "repo", "base_commit")}
    return f"{PREFIX}.{image_slug(identity['instance_id'])}.{content_digest(identity)[:12]}"


def official_image(row: Mapping[str, Any]) -> str:
    """Return the name of the published image: the row's ``image``, or for rows without that field the usual name."""
    image = row.get("image")
    if isinstance(image, str) and image:
        return image
    instance_id = _field(row, "instance_id").lower().replace("__", "_1776_")
    return f"swebench/sweb.eval.x86_64.{instance_id}:latest"


@dataclass(frozen=True)
class PreparedImage:
    """An image that is ready for boxes, and the environment variables that its processes need."""

    name: str
    env: Mapping[str, str]
    content: str = ""
    """The digest of the image's inputs."""


async def resolve_image(provider: SandboxProvider, row: Mapping[str, Any]) -> PreparedImage:
    """Return the row's prepared image. An official image is never used directly: its repository is not scrubbed.

    Raises:
        SandboxCapabilityError: the provider keeps no images.
        SandboxImageMissingError: the image was not prepared; the message gives the command.
    """
    image = prepared_image(row)
    require(provider, SupportsSnapshot, why="to hold the images of swe_bench rows")
    labels = await cast(SupportsSnapshot, provider).image_labels(image)
    if labels is None or CONTENT_LABEL not in labels:
        raise SandboxImageMissingError(
            f"sandbox provider '{provider.name}' has no image for '{row['instance_id']}' ({image}); prepare it with: "
            f"ng_prepare swe_bench rows=ROWS.jsonl sandbox={provider.name} [repos=DIR] "
            "[environments=ENVIRONMENTS.json]",
            image=image,
            provider=provider.name,
        )
    return PreparedImage(image, json.loads(labels.get(ENV_LABEL, "{}")), labels[CONTENT_LABEL])


def dataset_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the SWE-bench row in a row of a run: the row itself, or in NeMo Gym's rows the JSON in
    ``responses_create_params.metadata.instance_dict`` or ``verifier_metadata``."""
    if "instance_id" in row and "eval_script" in row:
        return row
    params = row.get("responses_create_params")
    metadata = params.get("metadata") if isinstance(params, Mapping) else None
    for holder in (metadata, row.get("verifier_metadata")):
        instance = holder.get("instance_dict", holder) if isinstance(holder, Mapping) else None
        if isinstance(instance, str):
            try:
                instance = json.loads(instance)
            except ValueError as error:
                raise RowError(f"instance_dict is not JSON: {error}", field="instance_dict") from error
        if isinstance(instance, Mapping) and "instance_id" in instance:
            return instance
    return row


def prompt_params(row: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return the ``responses_create_params`` of a row, with the problem statement as input if they have no input."""
    params = row.get("responses_create_params")
    own_params = (
        {key: value for key, value in params.items() if key != "metadata"} if isinstance(params, Mapping) else {}
    )
    if own_params.get("input"):
        return own_params
    task = SweBenchRow.from_mapping(dataset_row(row))
    text = template.format(problem_statement=task.problem_statement.strip(), repo=task.repo, workdir=TESTBED)
    return {**own_params, "input": [{"role": "user", "content": text}]}


# -- Test ids ------------------------------------------------------------------------------------------------------
# In the spellings that rows use, and the test functions that they name.
#
# Until Python 3.10 ``unittest`` prints ``test_x (module.Class)``; from 3.11 on ``test_x (module.Class.test_x)``. A row
# has the form of the Python version that made its logs. If our own run uses another version, its log is converted to
# the row's form, and the verdict's details record this. The official verdict on a stored log is computed from its
# unchanged text.

_LONG = re.compile(r"\b(?P<test>test\w*) \((?P<owner>[\w.]+)\.(?P=test)\)")
_SHORT = re.compile(r"\b(?P<test>test\w*) \((?P<owner>[\w.]+)\)")


def spelled_as_expected(log: str, expected: Iterable[str]) -> tuple[str, bool]:
    """Return ``log`` with its unittest ids in the form used in ``expected``, and whether anything changed. Ids that
    are in ``expected`` already are kept."""
    expected_ids = set(expected)
    any_changed = False

    def spelled(match: re.Match[str], other: str) -> str:
        nonlocal any_changed
        if match[0] in expected_ids or other not in expected_ids:
            return match[0]
        any_changed = True
        return other

    log = _LONG.sub(lambda match: spelled(match, f"{match['test']} ({match['owner']})"), log)
    log = _SHORT.sub(lambda match: spelled(match, f"{match['test']} ({match['owner']}.{match['test']})"), log)
    return log, any_changed


_UNITTEST = re.compile(r"^(?P<name>\w+) \((?P<owner>[\w.]+)\)$")


@dataclass(frozen=True)
class TestId:
    """A parsed test id. Fields that the id does not contain are empty."""

    __test__ = False

    function: str = ""
    classes: tuple[str, ...] = ()
    path: str = ""
    """The file's path, as pytest prints it."""
    module: str = ""
    """The dotted module name, as unittest prints it."""
    docstring: str = ""
    """The first line of the function's docstring, which Django prints in place of a name."""

    @classmethod
    def parse(cls, text: str) -> TestId:
        """Parse ``path::Class::test[param]``, ``test (module.Class)``, ``test (module.Class.test)`` or a bare name.
        Any other text is taken as a docstring."""
        if "::" in text:
            path, *classes, function = text.split("[", 1)[0].split("::")
            return cls(function=function.strip(), classes=tuple(classes), path=path)
        if match := _UNITTEST.match(text):
            owner = match["owner"].removesuffix(f".{match['name']}")
            module, _, class_name = owner.rpartition(".")
            return cls(function=match["name"], classes=(class_name,), module=module)
        if text.isidentifier():
            return cls(function=text)
        return cls(docstring=text.strip())

    def may_be_called(self, name: str) -> bool:
        """Whether the test may be the function ``Class.test`` or ``test``. An id without a file or module may be in
        any class."""
        owner, _, function = name.rpartition(".")
        if not self.path and not self.module:
            return function == self.function
        return (owner.rpartition(".")[2], function) == (self.classes[-1] if self.classes else "", self.function)

    def may_be_in(self, path: str) -> bool:
        """Whether the test may be in the file ``path``. An id without a file or module may be in any file."""
        if self.path:
            return path == self.path
        dotted = path.removesuffix(".py").replace("/", ".")
        return not self.module or dotted == self.module or dotted.endswith(f".{self.module}")
