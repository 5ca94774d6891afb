"""Whatever is sent, on every route of the API's own description: no 5xx, and only answers that it describes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from resources_servers.sandbox.tests.broker_process import BrokerProcess
from resources_servers.sandbox.tests.described import operations_of
from tests.properties import examples

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", examples(30).max_examples))
"""Per operation and kind of credential."""
CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)


def lent(broker: BrokerProcess) -> tuple[str, str]:
    """A box and the token of its owner."""
    headers = {**broker.caller(), "Idempotency-Key": uuid.uuid4().hex}
    made = httpx.post(f"{broker.url}/v1/sandboxes", json={"spec": {}, "ttl_s": 600}, headers=headers, timeout=60)
    assert made.status_code == 201, made.text
    return made.json()["sandbox"]["sandbox_id"], made.json()["lease"]["token"]


@pytest.fixture(scope="module")
def operations(broker: BrokerProcess) -> Mapping[str, Any]:
    return operations_of(broker.url)


def test_description_has_every_route(operations: Mapping[str, Any]) -> None:
    assert len(operations) >= 25
    for wanted in (
        "POST /v1/sandboxes",
        "PUT /v1/sandboxes/{sandbox_id}/execs/{exec_id}",
        "GET /v1/sandboxes/{sandbox_id}/execs/{exec_id}/output",
        "PUT /v1/sandboxes/{sandbox_id}/archive",
    ):
        assert wanted in operations


class Attacker:
    """Sends cases as a caller and owner who may, or as a stranger."""

    def __init__(self, broker: BrokerProcess, *, stranger: bool) -> None:
        self.broker, self.stranger = broker, stranger
        self._box: tuple[str, str] | None = None

    def attempt(self, name: str, case: Any) -> None:
        """Send one case, and judge its answer."""
        response = case.call(headers=self._headers(case), timeout=60)
        if name == "DELETE /v1/sandboxes/{sandbox_id}" and response.status_code == 204:
            self._box = None
        said = f"{name} → {response.status_code} {response.text[:300]}"
        assert response.status_code < 500, said
        if self.stranger and "/v1/" in name:
            assert response.status_code in (401, 404, 405, 422), said
        for check in CHECKS:
            case.validate_response(response, checks=[check])

    def _headers(self, case: Any) -> dict[str, str]:
        if self.stranger:
            return {"Authorization": "Bearer ngl1.sb-x.le-x.owner.AAAA"}
        if "sandbox_id" not in (case.path_parameters or {}):
            if (case.headers or {}).get("Idempotency-Key"):
                # Made-up keys repeat; a fresh one leads further than to a conflict.
                case.headers["Idempotency-Key"] = uuid.uuid4().hex
            return dict(self.broker.caller())
        self._box = self._box or lent(self.broker)
        case.path_parameters["sandbox_id"] = self._box[0]
        return {"Authorization": f"Bearer {self._box[1]}"}

    def attack(self, name: str, operation: Any) -> None:
        """Many cases of one operation; raises for the smallest that was answered wrongly."""

        @seeded(11)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(case=operation.as_strategy())
        def attempts(case: Any) -> None:
            self.attempt(name, case)

        attempts()


@pytest.mark.parametrize("who", ["caller and owner", "stranger"])
def test_no_route_fails_or_answers_what_it_does_not_describe(
    who: str, broker: BrokerProcess, operations: Mapping[str, Any]
) -> None:
    attacker = Attacker(broker, stranger=who == "stranger")
    wrong: list[str] = []
    for name, operation in operations.items():
        try:
            attacker.attack(name, operation)
        except (Exception, BaseExceptionGroup) as error:  # collected, so that one run tells all
            parts = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
            wrong += [f"{name}: {type(part).__name__}: {str(part)[:1500]}" for part in parts]
    assert not wrong, "\n\n".join(wrong)
