"""A profile of a piece of work, under the name by which NeMo Gym's agents ask for one."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

from pydantic import BaseModel, Field, PrivateAttr

LISTED = 100


class Profiler(BaseModel):
    """Profiles this thread between `start` and `stop` by Python's own profiler, and leaves two files below
    ``base_profile_dir``: ``<name>.prof``, which viewers of profiles read, and ``<name>.log``, the functions that took
    longest with what they called."""

    name: str = Field(pattern=r"^[^\s/]+$")
    base_profile_dir: Path

    _profile: cProfile.Profile | None = PrivateAttr(None)

    def start(self) -> None:
        """Raises `ValueError` where another profiler is at work, from Python 3.12 on."""
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self) -> None:
        """Write the files. Does nothing where nothing was started."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.disable()
        self.base_profile_dir.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(self.base_profile_dir / f"{self.name}.prof")
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(LISTED)
        (self.base_profile_dir / f"{self.name}.log").write_text(text.getvalue())
