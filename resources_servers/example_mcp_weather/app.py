"""Questions about the weather that can only be answered with the tools: each task has its own measurements.

Each tool is declared once, as a typed route. Harnesses call it over MCP, NeMo Gym's agents as ``POST /<tool>``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.contract.errors import RowError
from nemo_gym.contract.session import Artifact, Placement, RolloutIdentity, SessionDescriptor, Topology
from nemo_gym.contract.verdict import Verdict
from nemo_gym.environment.attempts import AttemptKey
from nemo_gym.environment.mcp.answers import answered_text, tool_calls
from nemo_gym.environment.routes import attempt_of


class CityRequest(BaseModel):
    city: str = Field(description="A city's English name, as list_cities spells it.", max_length=100)


class Weather(BaseModel):
    city: str
    temperature_c: float = Field(description="Degrees Celsius.")
    wind_m_s: float = Field(description="Metres per second.")


_MEASURED = tuple(name for name in Weather.model_fields if name != "city")


class Cities(BaseModel):
    cities: list[str]


class WeatherEnvironment(SimpleResourcesServer):
    """Rows hold ``weather`` (city → measurements) and ``answer``, both private. A right answer earns a reward of 1."""

    topologies: ClassVar[tuple[Topology, ...]] = (Topology.ENV_SANDBOXED,)
    tool_access: ClassVar[tuple[str, ...]] = ("mcp", "http")

    _weather: dict[AttemptKey, dict[str, Weather]] = PrivateAttr(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/list_cities")(self.list_cities)
        app.post("/get_weather")(self.get_weather)
        return app

    async def open_session(self, row: dict[str, Any], rollout: RolloutIdentity) -> SessionDescriptor:
        _expected(row)  # refuses a row that could not be graded
        self._weather[AttemptKey.of(rollout)] = _measurements(row)
        return SessionDescriptor(
            environment=self.config.name,
            task_id=rollout.task_id,
            rollout=rollout,
            placement=Placement(topology=Topology.ENV_SANDBOXED),
        )

    async def close_session(self, rollout: RolloutIdentity) -> None:
        self._weather.pop(AttemptKey.of(rollout), None)

    async def list_cities(self, request: Request) -> Cities:
        """The cities with a weather station."""
        return Cities(cities=sorted(self._weather[attempt_of(request)]))

    async def get_weather(self, request: Request, body: CityRequest) -> Weather:
        """What a city's weather station measures now."""
        stations, wanted = self._weather[attempt_of(request)], body.city.strip()
        weather = stations.get(wanted) or next(
            (found for city, found in stations.items() if city.strip().casefold() == wanted.casefold()), None
        )
        if weather is None:
            raise HTTPException(404, f"no weather station in '{body.city}'; call list_cities for the valid cities")
        return weather

    async def gold_solution(self, row: dict[str, Any]) -> dict[str, Any] | None:
        expected = _expected(row)
        return {"text": f"{row['answer']['city']}: {expected}"}

    async def grade(
        self, row: dict[str, Any], response: dict[str, Any], artifacts: Sequence[Artifact], rollout: RolloutIdentity
    ) -> Verdict:
        """Grade with the row and the response alone. The prompt does not contain the requested measurement, so a right
        answer must come from the tool. The details list the tool calls in the response."""
        expected, city = _expected(row), row["answer"]["city"]
        calls = tool_calls(response, self.config.name, ("list_cities", "get_weather"))
        answer = answered_text(response)
        is_right = city.lower() in answer.lower() and contains_number(answer, expected)
        details = {"tool_calls": [call.name for call in calls], "expected": expected}
        reason = None if is_right else "wrong answer" if answer.strip() else "the response has no text"
        return Verdict.of(float(is_right), details=details, reward_reason=reason)


def _measurements(row: dict[str, Any]) -> dict[str, Weather]:
    try:
        return {city: Weather.model_validate({**measured, "city": city}) for city, measured in row["weather"].items()}
    except (KeyError, AttributeError, TypeError, ValidationError):
        raise RowError(
            f"field 'weather' must hold numbers for every city: {{city: {{{', '.join(_MEASURED)}}}}}", field="weather"
        ) from None


def _expected(row: dict[str, Any]) -> float:
    weather = _measurements(row)
    match row.get("answer"):
        case {"city": str(city), "measurement": str(measurement)} if city in weather and measurement in _MEASURED:
            return float(getattr(weather[city], measurement))
    raise RowError(
        f"field 'answer' must be {{city, measurement}}: a city of 'weather' and {' or '.join(_MEASURED)}",
        field="answer",
    )


# An en dash (U+2013) is a minus sign unless it follows a digit, a letter or a unit, as in a range.
_NUMBER = re.compile(r"(?<![\d.,])(?:[-−]|(?<![\w°])\u2013)?\d+(?:[.,]\d+)?(?![\d]|[.,]\d)")


def contains_number(text: str, expected: float) -> bool:
    """Whether ``text`` states ``expected`` (to within 0.05) and at most two other numbers. The cap rejects lists of
    guesses."""
    numbers = [float(re.sub("[−\u2013]", "-", number).replace(",", ".")) for number in _NUMBER.findall(text)]
    return len(numbers) <= 3 and any(abs(number - expected) < 0.05 for number in numbers)


if __name__ == "__main__":
    WeatherEnvironment.run_webserver()
