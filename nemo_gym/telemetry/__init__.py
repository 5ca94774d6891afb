"""NeMo Gym's names for what a client measures of its connections; what is measured here: `nemo_gym.http.otlp`."""
