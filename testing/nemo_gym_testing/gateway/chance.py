"""Random faults, the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from nemo_gym.contract.errors import ConfigError
from nemo_gym_testing.gateway.faults import Abort, CutOff, Fault, Garbage, Hang, Status

_MAX_TOKENS = 24
_KINDS: dict[str, Callable[[random.Random, int | None], Fault]] = {
    "status": lambda draw, given: Status(500 if given is None else given),
    "hang": lambda draw, given: Hang(),
    "garbage": lambda draw, given: Garbage(),
    "cutoff": lambda draw, given: CutOff(draw.randrange(_MAX_TOKENS) if given is None else given),
    "abort": lambda draw, given: Abort(draw.randrange(_MAX_TOKENS) if given is None else given),
}


def faults_by_chance(spec: str, seed: int = 0) -> Callable[[], Fault | None]:
    """Return a function for `FakeEngine.chance`. ``spec`` lists ``kind[:number]=probability`` separated by commas, as
    in ``status:503=0.05,cutoff=0.1,abort:4=0.02,hang=0.01,garbage=0.01``. The number is the status (default 500), or
    the number of tokens after which the engine breaks off (default: random, below 24).

    Raises `ConfigError` naming the entry that is wrong.
    """
    chances: list[tuple[float, str, int | None]] = []
    for entry in filter(None, (part.strip() for part in spec.split(","))):
        kind, _, probability = entry.partition("=")
        name, _, number = kind.partition(":")
        try:
            chances.append((float(probability), name, int(number) if number else None))
        except ValueError as error:
            raise ConfigError(f"faults: '{entry}' is not kind[:number]=probability") from error
        if name not in _KINDS or not 0 <= chances[-1][0] <= 1:
            raise ConfigError(f"faults: '{entry}': kinds are {', '.join(_KINDS)}; a probability is between 0 and 1")
    if sum(chance for chance, *_ in chances) > 1:
        raise ConfigError("faults: the probabilities add up to more than 1")
    draw = random.Random(seed)

    def chance() -> Fault | None:
        at = draw.random()
        for probability, name, number in chances:
            if at < probability:
                return _KINDS[name](draw, number)
            at -= probability
        return None

    return chance
