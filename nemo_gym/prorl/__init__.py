"""The ProRL Agent Server's own names, over this suite's rollouts: see fern/pages/prorl.md."""
