"""Trees to and from a box behind a broker, as tar streams that are never whole in memory."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence

import aiohttp

from nemo_gym.contract.errors import NemoGymError, SandboxLostError
from nemo_gym.sandbox.providers.remote.box import RemoteBox
from nemo_gym.sandbox.providers.remote.connection import BrokerConnection, BrokerUnreachableError, SourceError
from nemo_gym.sandbox.transfer import absolute
from nemo_gym.sandbox.wire import routes
from nemo_gym.sandbox.wire.problems import error_of, parse_problem


async def put(connection: BrokerConnection, box: RemoteBox, path: str, tar: AsyncIterator[bytes]) -> None:
    """See `SandboxProvider.put_archive`. A stream that was begun is not sent again."""
    with _lost_when_unreachable():
        try:
            await connection.ask(
                "PUT",
                box.url(routes.archive(box.sandbox_id)),
                headers=box.headers,
                query={"path": absolute(path)},
                stream=lambda: tar,
            )
        except SourceError as failed:
            raise failed.error from None


async def get(
    connection: BrokerConnection, box: RemoteBox, path: str, *, exclude: Sequence[str], max_bytes: int | None
) -> AsyncIterator[bytes]:
    """See `SandboxProvider.get_archive`."""
    query = [("path", absolute(path)), *(("exclude", item) for item in exclude)]
    if max_bytes is not None:
        query.append(("max_bytes", str(max_bytes)))
    request_id = uuid.uuid4().hex
    with _lost_when_unreachable():
        opening = connection.open(
            "GET",
            box.url(routes.archive(box.sandbox_id)),
            headers={**box.headers, "Accept": routes.TAR, routes.REQUEST_ID_HEADER: request_id},
            query=query,
            repeatable=True,
        )
        try:
            async with opening as response:
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise await _why(connection, box, path, request_id, error) from error


async def _why(
    connection: BrokerConnection, box: RemoteBox, path: str, request_id: str, broken: BaseException
) -> NemoGymError:
    """Why an archive broke off: once an answer has begun, only the broker can say, and only when it is asked."""
    try:
        answer = await connection.ask(
            "GET",
            box.url(routes.archive_failure(box.sandbox_id)),
            headers=box.headers,
            query={"request_id": request_id},
            repeatable=True,
        )
    except NemoGymError:
        return SandboxLostError(f"the archive of {path} broke off ({type(broken).__name__})", retryable=True)
    return error_of(parse_problem(500, answer))


@contextlib.contextmanager
def _lost_when_unreachable() -> Iterator[None]:
    try:
        yield
    except BrokerUnreachableError as error:
        raise SandboxLostError(str(error), retryable=True, **error.details) from error
