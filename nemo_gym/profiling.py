"""A profiler, under the name that NeMo Gym's agents import."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

from pydantic import BaseModel, Field, PrivateAttr

LISTED = 100


class Profiler(BaseModel):
    """Profiles this thread between `start` and `stop` with Python's own profiler, and writes two files below
    ``base_profile_dir``: ``<name>.prof`` for profile viewers, and ``<name>.log``, which lists the `LISTED` functions
    that took longest, including the time of the functions that they called."""

    name: str = Field(pattern=r"^[^\s/]+$")
    base_profile_dir: Path

    _profile: cProfile.Profile | None = PrivateAttr(None)

    def start(self) -> None:
        """Start profiling. Raises `ValueError` if another profiler is active, from Python 3.12 on."""
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self) -> None:
        """Stop profiling and write the files. Does nothing if profiling was not started."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.disable()
        self.base_profile_dir.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(self.base_profile_dir / f"{self.name}.prof")
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(LISTED)
        (self.base_profile_dir / f"{self.name}.log").write_text(text.getvalue())
