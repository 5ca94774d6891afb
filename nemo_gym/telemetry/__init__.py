"""NeMo Gym's names for a client's connection metrics. This suite's own telemetry is in `nemo_gym.http.telemetry`."""
