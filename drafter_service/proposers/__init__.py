"""Ways to guess the next tokens. Each knows one way and nothing of sessions' wires, budgets or verifiers.

This package imports no proposer: `registry` does, one at a time, so that a lookup drafter never loads torch.
"""
