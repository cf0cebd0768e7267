"""Whole clusters in one event loop and virtual time: real roles, a made-up network, clocks that jump.

What is real and what is not: docs/testing.md.
"""
