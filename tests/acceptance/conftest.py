from __future__ import annotations

import os

# Before numpy is loaded: two threads are slower than one for matrices as small as the tiny policy's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
