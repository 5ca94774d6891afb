"""The official harness's grader, reached without the half gigabyte its package imports beside it.

``swebench.harness.__init__`` imports docker, datasets and modal. Its grading modules need none of them, so the package
object is set up here with its path and without running that file.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, Protocol, cast

from nemo_gym.contract.errors import VerifierError


class _Grading(Protocol):
    """What is used of ``swebench.harness.grading``."""

    START_TEST_OUTPUT: str
    END_TEST_OUTPUT: str
    TEST_EXIT_CODE: str
    TESTS_TIMEOUT: str
    APPLY_PATCH_FAIL: str
    PARSER_REGISTRY: dict[str, Any]

    def get_logs_eval(self, test_spec: Any, log_fp: str) -> tuple[dict[str, str], bool]: ...

    def get_eval_report(
        self, test_spec: Any, prediction: dict[str, str], test_log_path: str, include_tests_status: bool
    ) -> dict[str, Any]: ...


@functools.cache
def grading() -> _Grading:
    """The module ``swebench.harness.grading``.

    Raises:
        VerifierError: the package is not installed, or not of a release that has this module.
    """
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        raise VerifierError(
            "the package 'swebench' is not installed; install resources_servers/swe_bench's requirements"
        )
    if "swebench.harness" not in sys.modules:
        package = types.ModuleType("swebench.harness")
        package.__path__ = [str(Path(location) / "harness") for location in spec.submodule_search_locations]
        sys.modules["swebench.harness"] = package
    try:
        return cast(_Grading, importlib.import_module("swebench.harness.grading"))
    except ImportError as error:
        raise VerifierError(f"the installed 'swebench' cannot grade ({error}); install swebench>=5.0.2") from error


def test_spec(
    *,
    instance_id: str,
    repo: str,
    version: str,
    fail_to_pass: list[str],
    pass_to_pass: list[str],
    log_parser: str,
    eval_type: str,
) -> Any:
    """A ``swebench.types.TestSpec`` for grading alone: no image, no script."""
    module = grading()
    if log_parser not in module.PARSER_REGISTRY:
        raise VerifierError(f"the installed 'swebench' has no log parser '{log_parser}', which {instance_id} needs")
    spec_type = importlib.import_module("swebench.types").TestSpec
    return spec_type(
        instance_id=instance_id,
        image="",
        eval_script_list=[],
        repo=repo,
        version=version,
        FAIL_TO_PASS=fail_to_pass,
        PASS_TO_PASS=pass_to_pass,
        log_parser=log_parser,
        eval_type=eval_type,
    )
