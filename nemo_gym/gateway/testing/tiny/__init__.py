"""A small real model behind the wires of real engines: for proofs of token truth.

Needs the ``gateway`` extra.
"""
