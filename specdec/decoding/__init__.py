"""Decide tokens: noise, logits processing, the acceptance rules, and a reference loop that shows them at work.

Knows the lossless contract: what comes out is distributed exactly as the target alone. Everything is a function of its
arguments. Knows no model, no session, no wire and no clock.
"""
