"""The exported JSON Schema is the contract that the code enforces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nemo_gym.contract.session import SessionDescriptor

ROOT = Path(__file__).resolve().parents[2]


def test_exported_schema_matches_the_models() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "export-schema"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_exported_schema_names_every_descriptor_field() -> None:
    document = json.loads((ROOT / "fern" / "schemas" / "session.schema.json").read_text())
    described = document["$defs"]["SessionDescriptor"]
    assert set(described["properties"]) == set(SessionDescriptor.model_fields)
    assert described["additionalProperties"] is False
