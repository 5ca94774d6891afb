"""Images of the Docker Engine behind a server, which the server itself lets nobody name, label or look up."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_gym.contract.errors import SandboxCapabilityError
from nemo_gym.sandbox.providers.docker.config import DockerConfig
from nemo_gym.sandbox.providers.docker.engine import Engine
from nemo_gym.sandbox.providers.docker.images import Images
from nemo_gym.sandbox.providers.opensandbox.box import OpenSandboxBox
from nemo_gym.sandbox.providers.opensandbox.config import OpenSandboxConfig

NO_ENGINE = (
    "the server's own snapshots have neither names of our choice nor labels to find them by; where the Docker Engine "
    "behind it can be reached from here, set engine to its URL"
)


class EngineImages:
    """Images by the names that the docker provider gives them, in the engine that ``engine`` names.

    Raises (every method):
        SandboxCapabilityError: the configuration names no engine.
        SandboxError: it does not answer, or refused.
    """

    def __init__(self, config: OpenSandboxConfig) -> None:
        self._config = config
        self._images: Images | None = None
        self._engine: Engine | None = None

    def _connected(self) -> tuple[Engine, Images]:
        if self._config.engine is None:
            raise SandboxCapabilityError(f"opensandbox: no images can be kept: {NO_ENGINE}", provider="opensandbox")
        if self._engine is None or self._images is None:
            config = DockerConfig(base_url=self._config.engine)
            self._engine = Engine(config.base_url, request_timeout_s=config.request_timeout_s)
            self._images = Images(self._engine, config)
        return self._engine, self._images

    async def reference(self, image: str | None) -> str | None:
        """What the server has to be told to get an image; ``image`` itself without an engine to ask."""
        if self._config.engine is None:
            return image
        engine, images = self._connected()
        return await engine.call(images.reference, image)

    async def commit(self, box: OpenSandboxBox, image: str, labels: Mapping[str, str]) -> None:
        """The server's and this suite's own programs in the box are in the image too."""
        engine, images = self._connected()
        await engine.call(images.commit, f"sandbox-{box.sandbox_id}", image, labels)

    async def labels(self, image: str) -> Mapping[str, str] | None:
        engine, images = self._connected()
        return await engine.call(images.labels, image)

    async def remove(self, image: str) -> None:
        engine, images = self._connected()
        await engine.call(images.remove, image)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = self._images = None
