"""The rollout pipeline: it turns dataset rows into verdicts, and records each result exactly once."""
