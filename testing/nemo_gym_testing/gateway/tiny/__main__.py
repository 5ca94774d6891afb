"""Serve a tiny policy, or make one: see ``--help``."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from nemo_gym.contract.errors import NemoGymError
from nemo_gym_testing.gateway.chance import faults_by_chance
from nemo_gym_testing.gateway.tiny.engine import ENGINES, TinyEngine
from nemo_gym_testing.gateway.tiny.policies import FAMILIES, make_policy
from nemo_gym_testing.gateway.tiny.rules import load_script


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nemo_gym_testing.gateway.tiny", description=__doc__)
    parser.add_argument("--make", nargs=2, metavar=("FAMILY", "DIR"), help=f"write a policy: {', '.join(FAMILIES)}")
    parser.add_argument("--policy", metavar="DIR", help="serve this policy; prints the server's URL")
    parser.add_argument("--wire", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--script", metavar="FILE", help="YAML or JSON rules to force answers along")
    parser.add_argument("--log", metavar="FILE", help="append every call's tokens and logprobs, as JSON lines")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--seed", type=int, default=0, help="of weights (--make), sampling and faults")
    parser.add_argument("--faults", default="", help="such as status:503=0.05,cutoff=0.1,abort=0.02,hang=0.01")
    parser.add_argument("--tokens-per-second", type=float, help="of each call; default: as fast as it goes")
    parser.add_argument("--first-token-delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--max-context", type=int, default=131_072, metavar="TOKENS")
    parser.add_argument("--weights-version", default="w0")
    given = parser.parse_args()
    if not given.make and not given.policy:
        parser.error("give --make or --policy")
    try:
        if given.make:
            make_policy(given.make[1], given.make[0], given.seed)
        if given.policy:
            asyncio.run(_serve(_engine(given)))
    except NemoGymError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    return 0


def _engine(given: argparse.Namespace) -> TinyEngine:
    engine = ENGINES[given.wire](
        given.policy,
        load_script(given.script) if given.script else None,
        log=given.log,
        seed=given.seed,
        first_token_delay_s=given.first_token_delay,
        tokens_per_second=given.tokens_per_second,
        max_context_tokens=given.max_context,
        weights_version=given.weights_version,
        port=given.port,
    )
    engine.chance = faults_by_chance(given.faults, given.seed)
    return engine


async def _serve(engine: TinyEngine) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with engine:
        sys.stdout.write(f"{engine.url}\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    sys.exit(main())
