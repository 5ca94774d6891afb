"""What every part agrees on: errors, identity, the session contract, verdicts. It imports nothing of ours."""
