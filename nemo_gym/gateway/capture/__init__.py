"""Per-call capture: what went over the wire in each inference call, for people and dashboards.

Best effort by design: it never delays or fails a call, and nothing is trained on it. What must not be lost is the
journal's.
"""

from nemo_gym.gateway.capture.base import CallCapture, NoCapture
from nemo_gym.gateway.capture.config import CaptureConfig
from nemo_gym.gateway.capture.files import FileCapture, make_capture
from nemo_gym.gateway.capture.reading import model_call, read_calls
from nemo_gym.gateway.capture.records import CallRecord

__all__ = [
    "CallCapture",
    "CallRecord",
    "CaptureConfig",
    "FileCapture",
    "NoCapture",
    "make_capture",
    "model_call",
    "read_calls",
]
