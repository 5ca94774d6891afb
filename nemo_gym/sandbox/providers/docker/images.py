"""Images of the engine: asking a registry for one, committing boxes, and the labels an image was committed with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from nemo_gym.contract.errors import SandboxCreateError, SandboxError
from nemo_gym.sandbox.providers.docker.config import DockerConfig
from nemo_gym.sandbox.providers.docker.engine import Engine, explain, sdk_errors, status_of, translate
from nemo_gym.sandbox.providers.docker.host_image import HOST_IMAGE, ensure_host_image
from nemo_gym.sandbox.providers.docker.names import IMAGE_LABELS, image_reference


class Images:
    """Blocking; call through `Engine.call`."""

    def __init__(self, engine: Engine, config: DockerConfig) -> None:
        self._engine = engine
        self._config = config

    def reference(self, image: str | None) -> str:
        """The engine's name for the image a spec names. Builds the ``host`` image when that is asked for and absent.

        Raises:
            SandboxCreateError: the ``host`` image cannot be built here.
        """
        name = image or self._config.default_image
        return ensure_host_image(self._engine) if name == HOST_IMAGE else image_reference(name)

    def inspect(self, reference: str) -> dict[str, Any] | None:
        try:
            return dict(self._engine.client.inspect_image(reference))
        except sdk_errors() as error:
            if status_of(error) == 404:
                return None
            raise translate(error, f"looking for the image '{reference}'") from error

    def pull(self, reference: str) -> None:
        """Ask a registry for an image; waits up to ``pull_timeout_s`` for each step of it.

        Raises:
            SandboxCreateError: naming the image and what can be done.
        """
        repository, tag = _split(reference)
        timeout_s = self._engine.client.timeout
        try:
            self._engine.client.timeout = int(self._config.pull_timeout_s)
            self._engine.client.pull(repository, tag=tag)
        except sdk_errors() as error:
            raise self.missing(reference, f"asking the registry failed: {explain(error)}") from error
        finally:
            self._engine.client.timeout = timeout_s

    def missing(self, reference: str, why: str) -> SandboxCreateError:
        """The error for an image that is not there."""
        return SandboxCreateError(
            f"docker: there is no image '{reference}' in the engine at {self._engine.url}, and {why}. Prepare it "
            "first (ng_prepare for a benchmark's environments, 'docker load' or 'docker pull' for others), or name an "
            "image that exists; 'host' is built from this machine's own packages",
            image=reference,
        )

    def commit(self, container_id: str, image: str, labels: Mapping[str, str]) -> None:
        """Store a container's files as ``image``. What belongs to the box alone (its labels, its idle command) does
        not become the image's: labels it had are blanked, as the engine cannot remove them.

        Raises:
            SandboxError: the engine refused, or its disk is full.
            SandboxLostError: the box is gone.
        """
        if image == HOST_IMAGE:
            raise SandboxError(f"docker: a box cannot be committed as '{HOST_IMAGE}', which names the base image")
        reference = image_reference(image)
        client = self._engine.client
        try:
            found = client.inspect_container(container_id)
            base = client.inspect_image(found["Image"])["Config"] or {}
            blank = dict.fromkeys(found["Config"].get("Labels") or {}, "")
            stored = {**blank, **(base.get("Labels") or {}), IMAGE_LABELS: json.dumps(dict(labels))}
            conf: dict[str, Any] = {
                # An empty list would be filled with the box's own entry point; a blank one is not.
                "Entrypoint": base.get("Entrypoint") or [""],
                "Cmd": base.get("Cmd") or ["/bin/sh"],
                "Labels": stored,
                "WorkingDir": base.get("WorkingDir") or "/",
                "User": base.get("User") or "",
                "Env": base.get("Env") or [],
                "OpenStdin": False,
            }
            repository, tag = _split(reference)
            client.commit(container_id, repository=repository, tag=tag, conf=conf)
        except sdk_errors() as error:
            raise translate(error, f"committing the image '{image}'") from error

    def labels(self, image: str) -> dict[str, str] | None:
        """The labels given to `commit`; ``None`` when there is no such image."""
        found = self.inspect(image_reference(image))
        if found is None:
            return None
        labels: dict[str, str] = (found.get("Config") or {}).get("Labels") or {}
        if IMAGE_LABELS in labels:
            return {str(key): str(value) for key, value in json.loads(labels[IMAGE_LABELS]).items()}
        return {key: value for key, value in labels.items() if value}

    def remove(self, image: str) -> None:
        try:
            self._engine.client.remove_image(image_reference(image), force=True)
        except sdk_errors() as error:
            if status_of(error) != 404:
                raise translate(error, f"removing the image '{image}'") from error
        # An image that a box still used has only lost its name. Those of earlier removals can go by now; not young
        # ones, as a commit has no name for a moment either.
        unused = {"dangling": True, "label": [IMAGE_LABELS], "until": ["10m"]}
        with contextlib.suppress(*sdk_errors()):
            self._engine.client.prune_images(filters=unused)


def _split(reference: str) -> tuple[str, str]:
    """Repository and tag (or digest) of a reference."""
    if "@" in reference:
        repository, _, digest = reference.partition("@")
        return repository, digest
    head, _, last = reference.rpartition("/")
    name, _, tag = last.partition(":")
    return (f"{head}/{name}" if head else name), tag or "latest"
