"""No token opens what it is not for, on any route of the API's own description: a new route is covered by itself.

What a route takes is read from its description, which every route must give. Requests are made up from the schema, so
that nothing but the token is wrong with them.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from nemo_gym.broker.access import PREFIX, TokenSigner
from nemo_gym.broker.registry import LeaseRecord
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role, StackKeys
from nemo_gym.contract.session import LeaseScope
from nemo_gym.sandbox.wire.frames import FrameKind, FrameParser
from resources_servers.sandbox.tests.broker_process import INSTANCE, BrokerProcess
from resources_servers.sandbox.tests.described import operations_of
from tests.properties import examples

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", examples(20).max_examples))
"""Per operation and kind of token."""
OPEN = {"GET /healthz", "GET /readyz"}
TAKES = {
    r"Takes the owner's lease": "owner",
    r"Takes a lease of scope `operate`": "operate",
    r"Takes a lease of (any scope|scope `read`)": "read",
    r"Takes a caller's credential": "caller",
}
NARROWER = {"owner": ("read", "operate"), "operate": ("read",), "read": ()}
NOBODY = ((401, "unauthenticated"), (401, "credential"))
"""``credential``: what claims to be of a stack, and is not of this one."""
Headers = Mapping[str, str]


@dataclass(frozen=True)
class Lent:
    """A box, and tokens of it by scope."""

    sandbox_id: str
    tokens: Mapping[str, str]
    lease_ids: Mapping[str, str]

    @property
    def path(self) -> str:
        return f"/v1/sandboxes/{self.sandbox_id}"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class Owner:
    """Makes boxes of one caller."""

    def __init__(self, broker: BrokerProcess, name: str = "tests", role: Role = Role.OPERATOR) -> None:
        self.http = httpx.Client(base_url=broker.url, timeout=60)
        self.caller = broker.caller(name, role)

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()

    def ask(self, method: str, path: str, headers: Headers, **options: Any) -> Any:
        answer = self.http.request(method, path, headers=headers, **options)
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def box(self) -> Lent:
        key = {"Idempotency-Key": uuid.uuid4().hex}
        made = self.ask("POST", "/v1/sandboxes", {**self.caller, **key}, json={"spec": {}, "ttl_s": 1200})
        sandbox_id, owners = made["sandbox"]["sandbox_id"], made["lease"]
        leases = {scope: self.mint(sandbox_id, owners["token"], scope) for scope in ("operate", "read")}
        leases["owner"] = owners
        return Lent(
            sandbox_id,
            {scope: lease["token"] for scope, lease in leases.items()},
            {scope: lease["lease_id"] for scope, lease in leases.items()},
        )

    def mint(self, sandbox_id: str, token: str, scope: str, **body: Any) -> Any:
        return self.ask("POST", f"/v1/sandboxes/{sandbox_id}/leases", bearer(token), json={"scope": scope, **body})

    def run(self, box: Lent, command: str) -> str:
        exec_id, token = uuid.uuid4().hex, bearer(box.tokens["owner"])
        self.ask("PUT", f"{box.path}/execs/{exec_id}", token, json={"command": command})
        with self.http.stream(
            "GET", f"{box.path}/execs/{exec_id}/output", headers={**token, "Accept": "application/octet-stream"}
        ) as output:
            frames = [*FrameParser().feed(output.read())]
        return b"".join(frame.payload for frame in frames if frame.kind is FrameKind.STDOUT).decode()


@pytest.fixture(scope="module")
def operations(broker: BrokerProcess) -> Mapping[str, Any]:
    return operations_of(broker.url)


@pytest.fixture(scope="module")
def owner(broker: BrokerProcess) -> Iterator[Owner]:
    with Owner(broker) as made:
        yield made


def taken(operation: Any) -> str | None:
    """What an operation takes, as its description says; the first that it names."""
    said = operation.definition.raw.get("description", "")
    found = [(match.start(), kind) for text, kind in TAKES.items() if (match := re.search(text, said))]
    return min(found)[1] if found else None


def is_for_a_box(name: str) -> bool:
    return "{sandbox_id}" in name


def test_every_route_says_what_it_takes(operations: Mapping[str, Any]) -> None:
    silent = {name for name, operation in operations.items() if taken(operation) is None}
    assert silent == OPEN
    assert {taken(operation) for name, operation in operations.items() if is_for_a_box(name)} == {*NARROWER}
    assert (
        all(taken(operation) == "caller" for name, operation in operations.items() if not is_for_a_box(name))
        or {name for name, operation in operations.items() if not is_for_a_box(name) and taken(operation) != "caller"}
        == OPEN
    )


@dataclass
class Asker:
    """Sends made-up requests of one operation to a box, with headers of the test's choice."""

    name: str
    operation: Any
    box: Lent

    def send(self, case: Any, headers: Headers) -> tuple[int, str]:
        """Status and problem code."""
        parameters = case.path_parameters or {}
        if "sandbox_id" in parameters:
            parameters["sandbox_id"] = self.box.sandbox_id
        if "lease_id" in parameters:
            parameters["lease_id"] = self.box.lease_ids["operate"]
        if (case.headers or {}).get("Idempotency-Key"):
            case.headers["Idempotency-Key"] = uuid.uuid4().hex
        response = case.call(headers=dict(headers), timeout=60)
        if response.headers.get("content-type", [""])[0] != "application/problem+json":
            return response.status_code, ""
        return response.status_code, response.json()["code"]

    def refused(self, drawn: st.SearchStrategy[Headers], *allowed: tuple[int, str]) -> None:
        """Fails for the smallest request that was answered otherwise."""

        @seeded(23)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(case=self.operation.as_strategy(), headers=drawn)
        def attempts(case: Any, headers: Headers) -> None:
            answer = self.send(case, headers)
            assert answer in allowed, f"{self.name} with {headers} → {answer}, allowed: {allowed}"

        attempts()


def forged(box: Lent, other: Lent) -> st.SearchStrategy[Headers]:
    """Tokens that nobody issued: changed ones, parts of several put together, signed by another key, and nonsense."""
    genuine = [*box.tokens.values(), *other.tokens.values()]
    stranger = TokenSigner(secrets.token_bytes(32))
    scopes = [*LeaseScope]

    def changed(token: str, place: int, letter: str) -> str:
        place %= len(token)
        return token[:place] + letter + token[place + 1 :]

    def mixed(parts: tuple[str, ...]) -> str:
        return ".".join(token.split(".")[position] for position, token in enumerate(parts))

    letters = st.sampled_from("ABCxyz019._-")
    one = st.sampled_from(genuine)
    tokens = st.one_of(
        st.builds(changed, one, st.integers(0, 300), letters),
        st.builds(lambda token, size: token[:size], one, st.integers(0, 90)),
        st.builds(lambda token, rest: token + rest, one, letters),
        st.tuples(*[one] * 5).map(mixed),
        st.sampled_from(scopes).map(
            lambda scope: stranger.issue(LeaseRecord(box.lease_ids["owner"], box.sandbox_id, scope, 1))
        ),
        st.sampled_from(scopes).map(lambda scope: f"{PREFIX}.{box.sandbox_id}.{box.lease_ids['owner']}.{scope}."),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60),
    )
    return tokens.filter(lambda token: token.strip() not in genuine).map(bearer)


def exactly(token: str) -> st.SearchStrategy[Headers]:
    return st.just(bearer(token))


def box_operations(operations: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, operation) for name, operation in operations.items() if is_for_a_box(name))


def collect(work: Callable[[str, Any], None], operations: Iterator[tuple[str, Any]]) -> None:
    """Do it for each operation; one run tells all that is wrong."""
    wrong = []
    for name, operation in operations:
        try:
            work(name, operation)
        except (Exception, BaseExceptionGroup) as error:
            wrong.append(f"{name}: {str(error)[:600]}")
    assert not wrong, "\n\n".join(wrong)


def test_no_token_opens_what_it_is_not_for_on_any_route(
    broker: BrokerProcess, owner: Owner, operations: Mapping[str, Any]
) -> None:
    box, other = owner.box(), owner.box()
    with Owner(broker, "another", Role.ENVIRONMENT) as another_rollout:
        foreign = another_rollout.box()
    ended = owner.mint(box.sandbox_id, box.tokens["owner"], "operate", ttl_s=0.2)["token"]
    revoked = owner.mint(box.sandbox_id, box.tokens["owner"], "operate")
    owner.ask("DELETE", f"{box.path}/leases/{revoked['lease_id']}", bearer(box.tokens["owner"]))
    owner.run(box, "echo kept > /srv/mark")
    before = owner.run(box, "find /srv /tmp -xdev -type f | sort | xargs sha256sum")
    assert "/srv/mark" in before
    view = owner.ask("GET", box.path, bearer(box.tokens["owner"]))
    time.sleep(0.3)

    def attack(name: str, operation: Any) -> None:
        ask, wanted = Asker(name, operation, box), taken(operation)
        ask.refused(forged(box, other), (401, "unauthenticated"))
        ask.refused(exactly(ended), (401, "lease_expired"))
        ask.refused(exactly(revoked["token"]), (409, "fenced"))
        for scope in NARROWER[str(wanted)]:
            ask.refused(exactly(box.tokens[scope]), (403, "scope"))
        for scope in LeaseScope:
            for not_its in (other, foreign):
                ask.refused(exactly(not_its.tokens[scope]), (404, "sandbox_not_found"))
        # The caller that made another rollout's box: it is told nothing of this one.
        ask.refused(st.just(another_rollout.caller), (401, "unauthenticated"), (404, "sandbox_not_found"))
        strangers = StackKeys.generate().caller(Role.OPERATOR, "tests", INSTANCE)
        ask.refused(st.sampled_from([{CREDENTIAL_HEADER: strangers}, bearer(strangers), {}]), *NOBODY)

    collect(attack, box_operations(operations))
    assert owner.run(box, "find /srv /tmp -xdev -type f | sort | xargs sha256sum") == before
    now = owner.ask("GET", box.path, bearer(box.tokens["owner"]))
    assert {**now, "expires_at": 0} == {**view, "expires_at": 0}
    assert abs(now["expires_at"] - view["expires_at"]) < 5, "nobody renewed it"
    assert owner.ask("GET", f"{box.path}/doors", bearer(box.tokens["owner"]))["doors"] == {}
    for lease in ("read", "operate"):
        assert owner.ask("GET", box.path, bearer(box.tokens[lease]))["ready"] is True


def test_no_lease_and_no_stranger_is_taken_for_a_caller_on_any_route(
    broker: BrokerProcess, owner: Owner, operations: Mapping[str, Any]
) -> None:
    box = owner.box()
    genuine = broker.credential()
    others = StackKeys.generate()
    wrong = [others.caller(role, "tests", INSTANCE) for role in Role]
    wrong += [broker.keys.caller(Role.OPERATOR, "tests", "another_server"), genuine[:-1], genuine + "A", "x"]
    strangers = [{CREDENTIAL_HEADER: token} for token in wrong] + [bearer(token) for token in wrong]

    def attack(name: str, operation: Any) -> None:
        ask = Asker(name, operation, box)
        ask.refused(st.sampled_from([{}, *strangers]), *NOBODY)
        if name != "GET /v1/capabilities":  # which any lease may see
            ask.refused(st.sampled_from([*map(bearer, box.tokens.values())]), (401, "unauthenticated"))
        ask.refused(forged(box, box), (401, "unauthenticated"))

    listed = sorted(view["sandbox_id"] for view in owner.ask("GET", "/v1/sandboxes", owner.caller)["sandboxes"])
    callers = ((name, item) for name, item in operations.items() if not is_for_a_box(name) and name not in OPEN)
    collect(attack, callers)
    assert sorted(v["sandbox_id"] for v in owner.ask("GET", "/v1/sandboxes", owner.caller)["sandboxes"]) == listed


def test_right_token_is_refused_on_no_route(owner: Owner, operations: Mapping[str, Any]) -> None:
    """So that the refusals above are the tokens' doing."""

    def use(name: str, operation: Any) -> None:
        box, wanted = owner.box(), taken(operation)
        headers = owner.caller if wanted == "caller" else bearer(box.tokens[str(wanted)])

        @seeded(29)
        @settings(
            max_examples=3,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        @given(case=operation.as_strategy())
        def attempts(case: Any) -> None:
            status, code = Asker(name, operation, box).send(case, headers)
            # Generated doors lead to targets that agents may not reach, whatever their token.
            assert status not in (401, 403) or code in ("scope", "not_permitted"), (status, code)
            assert status < 500

        attempts()

    destructive = {"DELETE /v1/sandboxes"}  # by labels, it may mean the boxes of other tests
    collect(use, ((name, item) for name, item in operations.items() if name not in OPEN | destructive))
