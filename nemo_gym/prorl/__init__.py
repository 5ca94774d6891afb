"""The ProRL Agent Server's API on top of this suite's rollouts; see fern/pages/prorl.md."""
