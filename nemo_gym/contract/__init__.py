"""The types that all parts share: errors, identity, the session contract, verdicts. It imports only ``_util``."""
